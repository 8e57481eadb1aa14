// One rank of an allreduce below PyTorch's dispatcher: the program "allreduce DIRECTORY RANK SIZE
// KIND LIBRARIES". Ranks meet by files in the directory; MPI's library is looked for in LIBRARIES.
//
// Kinds: "zero-copy" and "staged", hbm within a node, on memory of the segment and on other memory;
// "mpi", hbm over MPI; "mpich", MPI itself, in place.
//
//   ready               answers once all have met
//   prepare BYTES TYPE  memory for it, and a sum that is checked
//   run SAMPLES CALLS   all ranks are told the same
#include <dlfcn.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bootstrap/rendezvous.h"
#include "communicator/message.h"
#include "communicator/mpi/abi.h"
#include "communicator/mpi/channel.h"
#include "communicator/mpi/communicator.h"
#include "communicator/mpi/connect.h"
#include "communicator/mpi/library.h"
#include "communicator/shm/join.h"
#include "communicator/shm/neighbour_listener.h"
#include "communicator/shm/neighbours.h"
#include "communicator/shm/reduction.h"
#include "file_store.h"
#include "memory/segment.h"
#include "memory/staging.h"
#include "program.h"
#include "progress/operation_queue.h"

namespace hbm::bench {
namespace {

constexpr std::chrono::seconds kPatience{60};
constexpr uint64_t kStagingBytes = 64 << 20;
constexpr size_t kChunk = 128 << 10;  // as a process group's within a node
constexpr memory::Policy kPolicy = memory::Policy::kPreferred;

struct Place {
  std::string directory;
  int rank;
  int size;
};

bool crowded(const Place& place) { return place.size > sysconf(_SC_NPROCESSORS_ONLN); }

bootstrap::Rendezvous meet(const Place& place,
                           const std::function<void(bootstrap::Member&)>& tell) {
  return bootstrap::meet(std::make_shared<FileStore>(place.directory), place.rank, place.size,
                         "the benchmark", Clock::now() + kPatience, [&] {
                           auto self = bootstrap::introduce("benchmark", kChunk);
                           tell(self);
                           return self;
                         });
}

// A way of adding up what all ranks have.
class Way {
 public:
  virtual ~Way() = default;
  virtual void* allocate(size_t bytes) = 0;
  virtual void allreduce(void* data, size_t count, Dtype dtype) = 0;
};

// hbm: a queue that a small operation is run on by its caller, as a process group does it.
class Queued : public Way {
 public:
  explicit Queued(const Place& place, std::function<void()> wake = {})
      : queue_(OperationQueue::create(OperationQueue::Order::kOrdered, crowded(place),
                                      {{}, {}, {}, std::move(wake), [](const std::vector<int>&) {
                                         return std::string("missing ranks");
                                       }})) {}
  ~Queued() override { queue_->stop(); }

  void* allocate(size_t bytes) override {
    pages_ = std::make_unique<Pages>(bytes);
    return pages_->bytes().data();
  }

 protected:
  void run(Operation& operation) {
    while (!queue_->try_claim("all_reduce")) {
    }
    queue_->run_claimed(operation, kPatience);
  }
  uint64_t next() { return ++sequence_; }

 private:
  const std::shared_ptr<OperationQueue> queue_;
  std::unique_ptr<Pages> pages_;
  uint64_t sequence_ = 0;
};

class WithinNode final : public Queued {
 public:
  WithinNode(const Place& place, bool zero_copy) : WithinNode(place, zero_copy, join(place)) {}

  void* allocate(size_t bytes) override {
    return zero_copy_ ? memory::process_segment(kPolicy)->allocate(bytes) : Queued::allocate(bytes);
  }

  void allreduce(void* data, size_t count, Dtype dtype) override {
    shm::ShmReduction operation(group_,
                                Signature{OpCode::kAllreduce, dtype, ReduceOp::kSum, -1, next()},
                                {data, data, count, -1, group_->size()});
    run(operation);
  }

 private:
  WithinNode(const Place& place, bool zero_copy, std::shared_ptr<shm::ShmGroup> group)
      : Queued(place, [group] { group->wake(); }),
        zero_copy_(zero_copy),
        group_(std::move(group)) {}

  static std::shared_ptr<shm::ShmGroup> join(const Place& place) {
    const auto segment = memory::process_segment(kPolicy);
    shm::NeighbourListener listener;
    const auto rendezvous = meet(place, [&](bootstrap::Member& self) {
      self.segment = memory::policy_name(kPolicy);
      self.listener = listener.name();
    });
    const auto neighbours = shm::explore(rendezvous, listener, segment);
    return shm::join(rendezvous, segment, neighbours, kChunk, crowded(place), /*threads=*/1);
  }

  const bool zero_copy_;
  const std::shared_ptr<shm::ShmGroup> group_;
};

std::shared_ptr<mpi::Channel> connect(const Place& place) {
  const auto channel = std::make_shared<mpi::Channel>();
  channel->rank = place.rank;
  channel->size = place.size;
  channel->group = "the benchmark";
  channel->chunk_bytes = mpi::chunk_bytes(kStagingBytes, place.size);
  channel->staging = memory::process_staging(kPolicy, kStagingBytes);
  const auto rendezvous = meet(place, [](bootstrap::Member&) {});
  if (place.size > 1) channel->communicator = mpi::connect(rendezvous, {}).communicator;
  return channel;
}

class OverMpi final : public Queued {
 public:
  explicit OverMpi(const Place& place) : Queued(place), communicator_(connect(place)) {}

  void allreduce(void* data, size_t count, Dtype dtype) override {
    run(*communicator_.allreduce(next(), data, data, count, dtype, ReduceOp::kSum));
  }

 private:
  mpi::MpiCommunicator communicator_;
};

class MpiItself final : public Way {
 public:
  explicit MpiItself(const Place& place) : channel_(connect(place)) {}

  void* allocate(size_t bytes) override {
    pages_ = std::make_unique<Pages>(bytes);
    return pages_->bytes().data();
  }

  void allreduce(void* data, size_t count, Dtype dtype) override {
    mpi::library().api->check(allreduce_(MPI_IN_PLACE, data, static_cast<int>(count),
                                         type_of(dtype), MPI_SUM, MPI_COMM_WORLD),
                              "MPI_Allreduce");
  }

 private:
  using AllreduceFunction = decltype(::MPI_Allreduce);

  static MPI_Datatype type_of(Dtype dtype) {
    if (dtype == Dtype::kFloat32) return MPI_FLOAT;
    if (dtype == Dtype::kFloat64) return MPI_DOUBLE;
    throw Error(ErrorKind::kUnsupported,
                std::string("MPI is measured in float32 and float64, not ") + dtype_name(dtype));
  }

  // Finds MPI_Allreduce in the MPI library that is loaded already; mpi::library() has only the
  // functions that hbm calls.
  static AllreduceFunction* function() {
    void* const library = dlopen(mpi::library().path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    void* const found = library == nullptr ? nullptr : dlsym(library, "MPI_Allreduce");
    if (found == nullptr) throw Error(ErrorKind::kUnavailable, dlerror());
    return reinterpret_cast<AllreduceFunction*>(found);
  }

  const std::shared_ptr<mpi::Channel> channel_;  // keeps the world
  AllreduceFunction* const allreduce_ = function();
  std::unique_ptr<Pages> pages_;
};

std::unique_ptr<Way> make_way(const std::string& kind, const Place& place) {
  if (kind == "zero-copy" || kind == "staged") {
    return std::make_unique<WithinNode>(place, kind == "zero-copy");
  }
  if (kind == "mpi") return std::make_unique<OverMpi>(place);
  if (kind == "mpich") return std::make_unique<MpiItself>(place);
  throw Error(ErrorKind::kInvalid, "no kind \"" + kind + "\"");
}

// An element of 1.
std::string_view one_of(Dtype dtype) {
  using namespace std::string_view_literals;
  switch (dtype) {
    case Dtype::kFloat32:
      return "\0\0\x80\x3f"sv;
    case Dtype::kFloat64:
      return "\0\0\0\0\0\0\xf0\x3f"sv;
    case Dtype::kFloat16:
      return "\0\x3c"sv;
    default:
      return "\x80\x3f"sv;  // bfloat16
  }
}

Dtype dtype_of(const std::string& name) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat16, Dtype::kBFloat16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw Error(ErrorKind::kInvalid, "no type \"" + name + "\"");
}

class Rank {
 public:
  Rank(Place place, std::string kind) : place_(std::move(place)), kind_(std::move(kind)) {}

  void ready() { way_ = make_way(kind_, place_); }

  // One rank has ones and the others zeros, so everybody's sum is one; then zeros are added.
  void prepare(size_t bytes, const std::string& dtype) {
    dtype_ = dtype_of(dtype);
    const std::string_view one = one_of(dtype_);
    count_ = bytes / one.size();
    data_ = static_cast<std::byte*>(way_->allocate(bytes));
    std::memset(data_, 0, bytes);
    if (place_.rank == 0) {
      for (size_t i = 0; i < count_; ++i)
        std::memcpy(data_ + i * one.size(), one.data(), one.size());
    }
    way_->allreduce(data_, count_, dtype_);
    for (size_t i = 0; i < count_; ++i) {
      if (std::memcmp(data_ + i * one.size(), one.data(), one.size()) != 0) {
        throw Error(ErrorKind::kMismatch, "element " + std::to_string(i) + " of the sum is wrong");
      }
    }
    std::memset(data_, 0, bytes);
  }

  Numbers run(size_t samples, size_t calls) {
    return timed([this] { way_->allreduce(data_, count_, dtype_); }, samples, calls);
  }

 private:
  const Place place_;
  const std::string kind_;
  std::unique_ptr<Way> way_;
  std::byte* data_ = nullptr;
  size_t count_ = 0;
  Dtype dtype_{};
};

}  // namespace
}  // namespace hbm::bench

int main(int argc, char** argv) {
  using namespace hbm::bench;
  if (argc != 6) return 2;
  hbm::mpi::set_search_path({argv[5]});
  Rank rank({argv[1], std::stoi(argv[2]), std::stoi(argv[3])}, argv[4]);
  return serve(
      {{"ready",
        [&](const Words&) {
          rank.ready();
          return Numbers();
        }},
       {"prepare",
        [&](const Words& words) {
          rank.prepare(number(words, 0), words.at(1));
          return Numbers();
        }},
       {"run", [&](const Words& words) { return rank.run(number(words, 0), number(words, 1)); }}});
}
