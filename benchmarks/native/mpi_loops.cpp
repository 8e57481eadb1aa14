#include "mpi_loops.h"

#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <utility>

#include "base/error.h"
#include "program.h"

namespace hbm::bench {
namespace {

// A collective of one size. `sent` and `received` are the elements of a rank's two buffers; in
// place there is the received one alone. `call` returns MPI's code.
struct Job {
  size_t sent;
  size_t received;
  std::function<int(size_t)> expected;  // what an element of the received ones is afterwards
  std::function<int(const void* sent, void* received)> call;
};

// Makes the jobs. Each rank's elements are its rank + 1 before.
class Jobs {
 public:
  Jobs(const MpiWorld& world, size_t count, MPI_Datatype type)
      : rank_(world.rank), size_(world.size), library_(world.library), count_(count), type_(type) {}

  Job allreduce() const {
    const auto allreduce = function<decltype(::MPI_Allreduce)>("MPI_Allreduce");
    return {0, count_, sum(), [=, count = all(), type = type_](const void*, void* data) {
              return allreduce(MPI_IN_PLACE, data, count, type, MPI_SUM, MPI_COMM_WORLD);
            }};
  }

  Job broadcast() const {
    const auto broadcast = function<decltype(::MPI_Bcast)>("MPI_Bcast");
    return {0, count_, same(1), [=, count = all(), type = type_](const void*, void* data) {
              return broadcast(data, count, type, 0, MPI_COMM_WORLD);
            }};
  }

  Job reduce() const {
    const auto reduce = function<decltype(::MPI_Reduce)>("MPI_Reduce");
    return {0, count_, root() ? sum() : same(rank_ + 1),
            [=, root = root(), count = all(), type = type_](const void*, void* data) {
              return reduce(root ? MPI_IN_PLACE : data, root ? data : nullptr, count, type, MPI_SUM,
                            0, MPI_COMM_WORLD);
            }};
  }

  Job allgather() const {
    const auto allgather = function<decltype(::MPI_Allgather)>("MPI_Allgather");
    return {share(), count_, of_senders(),
            [=, part = part(), type = type_](const void* own, void* gathered) {
              return allgather(own, part, type, gathered, part, type, MPI_COMM_WORLD);
            }};
  }

  Job gather() const {
    const auto gather = function<decltype(::MPI_Gather)>("MPI_Gather");
    return {share(), root() ? count_ : 0, of_senders(),
            [=, part = part(), type = type_](const void* own, void* gathered) {
              return gather(own, part, type, gathered, part, type, 0, MPI_COMM_WORLD);
            }};
  }

  Job gather_in_place() const {
    const auto gather = function<decltype(::MPI_Gather)>("MPI_Gather");
    return {0, root() ? count_ : share(), root() ? of_senders() : same(rank_ + 1),
            [=, root = root(), part = part(), type = type_](const void*, void* data) {
              return gather(root ? MPI_IN_PLACE : data, part, type, root ? data : nullptr, part,
                            type, 0, MPI_COMM_WORLD);
            }};
  }

  Job scatter() const {
    const auto scatter = function<decltype(::MPI_Scatter)>("MPI_Scatter");
    return {root() ? count_ : 0, share(), same(1),
            [=, part = part(), type = type_](const void* scattered, void* own) {
              return scatter(scattered, part, type, own, part, type, 0, MPI_COMM_WORLD);
            }};
  }

  Job reduce_scatter() const {
    const auto call = function<decltype(::MPI_Reduce_scatter_block)>("MPI_Reduce_scatter_block");
    return {count_, share(), sum(),
            [=, part = part(), type = type_](const void* scattered, void* own) {
              return call(scattered, own, part, type, MPI_SUM, MPI_COMM_WORLD);
            }};
  }

  Job alltoall() const {
    const auto alltoall = function<decltype(::MPI_Alltoall)>("MPI_Alltoall");
    return {count_, count_, of_senders(),
            [=, part = part(), type = type_](const void* sent, void* received) {
              return alltoall(sent, part, type, received, part, type, MPI_COMM_WORLD);
            }};
  }

  Job barrier() const {
    const auto barrier = function<decltype(::MPI_Barrier)>("MPI_Barrier");
    return {0, 0, same(0), [=](const void*, void*) { return barrier(MPI_COMM_WORLD); }};
  }

  // There and back within the pairs (0, 1), (2, 3), ...; an odd last rank does nothing.
  Job sendrecv() const {
    const auto send = function<decltype(::MPI_Send)>("MPI_Send");
    const auto receive = function<decltype(::MPI_Recv)>("MPI_Recv");
    const int peer = rank_ ^ 1;
    const bool first = rank_ < peer;
    return {0, count_, same(std::min(rank_, peer) + 1),
            [=, idle = peer >= size_, count = all(), type = type_](const void*, void* data) {
              if (idle) return MPI_SUCCESS;
              const auto sent = [&] { return send(data, count, type, peer, 0, MPI_COMM_WORLD); };
              const auto received = [&] {
                return receive(data, count, type, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
              };
              const int code = first ? sent() : received();
              if (code != MPI_SUCCESS) return code;
              return first ? received() : sent();
            }};
  }

 private:
  template <class Function>
  Function* function(const char* name) const {
    void* const found = dlsym(library_, name);
    if (found == nullptr) throw Error(ErrorKind::kUnavailable, dlerror());
    return reinterpret_cast<Function*>(found);
  }

  bool root() const { return rank_ == 0; }
  int all() const { return static_cast<int>(count_); }
  // The elements of one rank. Throws Error(kInvalid) unless all have as many.
  size_t share() const {
    const auto ranks = static_cast<size_t>(size_);
    if (count_ % ranks == 0) return count_ / ranks;
    throw Error(ErrorKind::kInvalid, std::to_string(count_) + " elements have no equal parts on " +
                                         std::to_string(ranks) + " ranks");
  }
  int part() const { return static_cast<int>(share()); }

  std::function<int(size_t)> sum() const { return same(size_ * (size_ + 1) / 2); }
  std::function<int(size_t)> of_senders() const {
    return [share = share()](size_t i) { return static_cast<int>(i / share) + 1; };
  }
  static std::function<int(size_t)> same(int value) {
    return [value](size_t) { return value; };
  }

  const int rank_;
  const int size_;
  void* const library_;
  const size_t count_;
  const MPI_Datatype type_;
};

const std::map<std::string, Job (Jobs::*)() const> kJobs = {
    {"allreduce", &Jobs::allreduce}, {"broadcast", &Jobs::broadcast},
    {"reduce", &Jobs::reduce},       {"allgather", &Jobs::allgather},
    {"gather", &Jobs::gather},       {"gather_in_place", &Jobs::gather_in_place},
    {"scatter", &Jobs::scatter},     {"reduce_scatter", &Jobs::reduce_scatter},
    {"alltoall", &Jobs::alltoall},   {"barrier", &Jobs::barrier},
    {"sendrecv", &Jobs::sendrecv},
};

class MpiRank {
 public:
  explicit MpiRank(MpiWorld world) : world_(std::move(world)) {}

  void prepare(const std::string& collective, size_t bytes, const std::string& type) {
    if (type == "float32") return prepare<float>(collective, bytes, MPI_FLOAT);
    if (type == "float64") return prepare<double>(collective, bytes, MPI_DOUBLE);
    throw Error(ErrorKind::kInvalid, "MPI is measured in float32 and float64, not " + type);
  }

  Numbers run(size_t samples, size_t calls) { return timed(call_, samples, calls); }

 private:
  // Leaves zeros.
  template <class Element>
  void prepare(const std::string& collective, size_t bytes, MPI_Datatype type) {
    const auto found = kJobs.find(collective);
    if (found == kJobs.end()) {
      throw Error(ErrorKind::kInvalid, "no collective \"" + collective + "\"");
    }
    const Job job = (Jobs(world_, bytes / sizeof(Element), type).*found->second)();
    const auto own = static_cast<Element>(world_.rank + 1);
    const auto sent = filled(sent_, job.sent, own);
    const auto received = filled(received_, job.received, own);
    call_ = [this, collective, call = job.call, from = sent.data(), to = received.data()] {
      check(collective, call(from, to));
    };
    call_();
    for (size_t i = 0; i < received.size(); ++i) {
      if (received[i] != static_cast<Element>(job.expected(i))) {
        throw Error(ErrorKind::kMismatch,
                    "element " + std::to_string(i) + " of the " + collective + " is wrong");
      }
    }
    std::ranges::fill(sent, Element{0});
    std::ranges::fill(received, Element{0});
  }

  // Replaces `pages` by memory for so many elements, if any.
  template <class Element>
  static std::span<Element> filled(std::unique_ptr<Pages>& pages, size_t count, Element value) {
    pages.reset();
    if (count == 0) return {};
    pages = std::make_unique<Pages>(count * sizeof(Element));
    const std::span elements{reinterpret_cast<Element*>(pages->bytes().data()), count};
    std::ranges::fill(elements, value);
    return elements;
  }

  void check(const std::string& collective, int code) const {
    if (code == MPI_SUCCESS) return;
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    const auto error_string =
        reinterpret_cast<decltype(::MPI_Error_string)*>(dlsym(world_.library, "MPI_Error_string"));
    error_string(code, text.data(), &length);
    throw Error(ErrorKind::kNetwork, "MPI's " + collective + " failed: " +
                                         std::string(text.data(), static_cast<size_t>(length)));
  }

  const MpiWorld world_;
  std::unique_ptr<Pages> sent_;
  std::unique_ptr<Pages> received_;
  std::function<void()> call_;
};

}  // namespace

int serve_mpi(const std::function<MpiWorld()>& join) {
  std::unique_ptr<MpiRank> rank;
  return serve(
      {{"ready",
        [&](const Words&) {
          rank = std::make_unique<MpiRank>(join());
          return Numbers();
        }},
       {"prepare",
        [&](const Words& words) {
          rank->prepare(words.at(0), number(words, 1), words.at(2));
          return Numbers();
        }},
       {"run", [&](const Words& words) { return rank->run(number(words, 0), number(words, 1)); }}});
}

}  // namespace hbm::bench
