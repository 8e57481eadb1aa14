// The program "hbm_loops DIRECTORY RANK SIZE LIBRARIES KIND": one rank of hbm's collectives,
// without PyTorch's dispatcher. It serves the commands of collective_loops.h. Ranks meet by files
// in DIRECTORY. The program searches the directory LIBRARIES for MPI's library.
//
// Kinds: "zero-copy" uses memory of the segment, "staged" other memory. With HBMCOMM_NODE=mpi in
// the environment, all collectives use MPI, as in a process group.
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collective_loops.h"
#include "communicator/connect/connect.h"
#include "communicator/mpi/library.h"
#include "file_store.h"
#include "meeting.h"
#include "memory/segment.h"
#include "program.h"
#include "progress/operation_queue.h"

namespace hbm::bench {
namespace {

using communicator::Communicator;
using communicator::OperationPtr;
using communicator::Sink;
using communicator::Source;
using communicator::connect::GroupConnection;

constexpr uint64_t kStagingBytes = 64 << 20;
constexpr memory::Policy kPolicy = memory::Policy::kPreferred;
constexpr int kRoot = 0;

GroupConnection connect_group(const RankPlace& place) {
  const auto store = std::make_shared<FileStore>(place.directory);
  return communicator::connect::connect({.store = store,
                                         .job_store = store,
                                         .global_ranks = {},
                                         .heartbeat = kPatience,
                                         .rank = place.rank,
                                         .size = place.size,
                                         .group = "the benchmark",
                                         .deadline = progress::Clock::now() + kPatience,
                                         .version = "benchmark",
                                         .transport = bootstrap::default_transport(),
                                         .parameter_server = "none",
                                         .policy = kPolicy,
                                         .staging_bytes = kStagingBytes});
}

// A communicator and its two operation queues. The caller waits for each operation, as the caller
// of a process group does with async_op=False.
class Group {
 public:
  explicit Group(const RankPlace& place)
      : connection_(connect_group(place)),
        collectives_(queue(progress::OperationQueue::Order::kOrdered)),
        messages_(queue(progress::OperationQueue::Order::kUnordered)) {}
  ~Group() {
    messages_->stop();
    collectives_->stop();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  Communicator& communicator() const { return *connection_.communicator; }
  uint64_t next() { return ++sequence_; }

  // Runs the operation that `make` returns, as an Operation* or as an owning pointer.
  template <class Make>
  void run(const Make& make) {
    while (!collectives_->try_claim("the benchmark")) {
    }
    decltype(make()) operation{};
    try {
      operation = make();
    } catch (...) {
      collectives_->unclaim();
      throw;
    }
    collectives_->run_claimed(*operation, kPatience);
  }

  void run_message(OperationPtr operation) {
    const auto request = messages_->enqueue(std::move(operation), kPatience, {});
    messages_->launch(request, progress::Mode::kSync);
    if (request->error()) std::rethrow_exception(request->error());
  }

 private:
  std::shared_ptr<progress::OperationQueue> queue(progress::OperationQueue::Order order) {
    return progress::OperationQueue::create(
        order, connection_.oversubscribed,
        {[this](const progress::Operation& operation) { connection_.peers->check(operation); },
         {},
         {},
         [this] { connection_.communicator->wake(); },
         [](const std::vector<int>&) { return std::string("missing ranks"); }});
  }

  const GroupConnection connection_;
  const std::shared_ptr<progress::OperationQueue> collectives_;
  const std::shared_ptr<progress::OperationQueue> messages_;
  uint64_t sequence_ = 0;
};

// Returns equal parts of a buffer, one for each rank.
template <class Part, class Data>
std::vector<Part> parts(Data* data, size_t count, Dtype dtype, int size) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const std::byte, std::byte>;
  const size_t share = share_of(count, size);
  std::vector<Part> found;
  for (int rank = 0; rank < size; ++rank) {
    const size_t offset = static_cast<size_t>(rank) * share * element_size(dtype);
    found.push_back({static_cast<Byte*>(data) + offset, share});
  }
  return found;
}

// Makes functions that each call one collective on a rank's buffers.
class HbmCalls {
 public:
  HbmCalls(Group& group, const RankPlace& place, const CollectiveBuffers& buffers)
      : group_(group), place_(place), buffers_(buffers) {}

  std::function<void()> allreduce() const {
    const auto [sent, data, count, dtype] = buffers_;
    Communicator& communicator = group_.communicator();
    if (communicator.preallocates_allreduce(data, count * element_size(dtype))) {
      return [=, this_group = &group_, &communicator] {
        this_group->run([&] {
          return communicator.preallocated_allreduce(this_group->next(), data, count, dtype,
                                                     ReduceOp::kSum);
        });
      };
    }
    return collective([=](Communicator& by, uint64_t number) {
      return by.allreduce(number, data, data, count, dtype, ReduceOp::kSum);
    });
  }

  std::function<void()> broadcast() const {
    return collective([buffers = buffers_](Communicator& by, uint64_t number) {
      return by.broadcast(number, buffers.received, buffers.count, buffers.dtype, kRoot);
    });
  }

  std::function<void()> reduce() const {
    return collective([buffers = buffers_](Communicator& by, uint64_t number) {
      return by.reduce(number, buffers.received, buffers.received, buffers.count, buffers.dtype,
                       ReduceOp::kSum, kRoot);
    });
  }

  std::function<void()> allgather() const {
    return collective(
        [own = own_source(), all = all_sinks(), dtype = buffers_.dtype](
            Communicator& by, uint64_t number) { return by.allgather(number, own, all, dtype); });
  }

  std::function<void()> gather() const {
    return collective([own = own_source(), all = root() ? all_sinks() : std::vector<Sink>{},
                       dtype = buffers_.dtype](Communicator& by, uint64_t number) {
      return by.gather(number, own, all, dtype, kRoot);
    });
  }

  std::function<void()> scatter() const {
    return collective([all = root() ? all_sources() : std::vector<Source>{}, own = own_sink(),
                       dtype = buffers_.dtype](Communicator& by, uint64_t number) {
      return by.scatter(number, all, own, dtype, kRoot);
    });
  }

  std::function<void()> reduce_scatter() const {
    return collective([all = all_sources(), own = own_sink(), dtype = buffers_.dtype](
                          Communicator& by, uint64_t number) {
      return by.reduce_scatter(number, all, own.data, dtype, ReduceOp::kSum);
    });
  }

  std::function<void()> alltoall() const {
    return collective([sent = all_sources(), received = all_sinks(), dtype = buffers_.dtype](
                          Communicator& by, uint64_t number) {
      return by.alltoall(number, sent, received, dtype);
    });
  }

  std::function<void()> barrier() const {
    return collective([](Communicator& by, uint64_t number) { return by.barrier(number); });
  }

  std::function<void()> sendrecv() const {
    const Pair pair(place_.rank, place_.size);
    const auto send = [buffers = buffers_, &group = group_, pair] {
      group.run_message(group.communicator().send({buffers.received, buffers.count}, buffers.dtype,
                                                  pair.peer, /*tag=*/0));
    };
    const auto receive = [buffers = buffers_, &group = group_, pair] {
      group.run_message(group.communicator().receive({buffers.received, buffers.count},
                                                     buffers.dtype, pair.peer, /*tag=*/0,
                                                     std::make_shared<int>()));
    };
    if (!pair.whole) return [] {};
    return [=] {
      if (pair.first) send();
      receive();
      if (!pair.first) send();
    };
  }

 private:
  template <class Make>
  std::function<void()> collective(Make make) const {
    return [make = std::move(make), &group = group_] {
      group.run([&] { return make(group.communicator(), group.next()); });
    };
  }

  bool root() const { return place_.rank == kRoot; }
  size_t share() const { return share_of(buffers_.count, place_.size); }
  Source own_source() const { return {buffers_.sent, share()}; }
  Sink own_sink() const { return {buffers_.received, share()}; }
  std::vector<Source> all_sources() const {
    return parts<Source>(buffers_.sent, buffers_.count, buffers_.dtype, place_.size);
  }
  std::vector<Sink> all_sinks() const {
    return parts<Sink>(buffers_.received, buffers_.count, buffers_.dtype, place_.size);
  }

  Group& group_;
  const RankPlace& place_;
  const CollectiveBuffers buffers_;
};

const std::map<std::string, std::function<void()> (HbmCalls::*)() const> kCalls = {
    {"allreduce", &HbmCalls::allreduce}, {"broadcast", &HbmCalls::broadcast},
    {"reduce", &HbmCalls::reduce},       {"allgather", &HbmCalls::allgather},
    {"gather", &HbmCalls::gather},       {"scatter", &HbmCalls::scatter},
    {"alltoall", &HbmCalls::alltoall},   {"reduce_scatter", &HbmCalls::reduce_scatter},
    {"barrier", &HbmCalls::barrier},     {"sendrecv", &HbmCalls::sendrecv},
};

class HbmCollectives final : public Collectives {
 public:
  HbmCollectives(const RankPlace& place, bool zero_copy)
      : place_(place), zero_copy_(zero_copy), group_(place) {}

  int rank() const override { return place_.rank; }
  int size() const override { return place_.size; }

  std::shared_ptr<std::byte> allocate(size_t bytes) override {
    if (!zero_copy_) return Collectives::allocate(bytes);
    const auto segment = memory::process_segment(kPolicy);
    return {static_cast<std::byte*>(segment->allocate(bytes)),
            [segment](std::byte* block) { segment->free(block); }};
  }

  std::function<void()> call(const std::string& collective,
                             const CollectiveBuffers& buffers) override {
    const auto found = kCalls.find(collective);
    if (found != kCalls.end()) return (HbmCalls(group_, place_, buffers).*found->second)();
    throw Error(ErrorKind::kInvalid, "hbm has no loop of \"" + collective + "\"");
  }

 private:
  const RankPlace place_;
  const bool zero_copy_;
  Group group_;
};

}  // namespace
}  // namespace hbm::bench

int main(int argc, char** argv) {
  using namespace hbm::bench;
  if (argc != 6) return 2;
  hbm::communicator::mpi::set_search_path({argv[4]});
  const RankPlace place{argv[1], std::stoi(argv[2]), std::stoi(argv[3])};
  const std::string kind = argv[5];
  if (kind != "zero-copy" && kind != "staged") return 2;
  return serve_collectives(
      [&] { return std::make_unique<HbmCollectives>(place, kind == "zero-copy"); });
}
