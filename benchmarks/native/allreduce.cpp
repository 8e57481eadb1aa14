// One rank of an allreduce below PyTorch's dispatcher: the program "allreduce DIRECTORY RANK SIZE
// LIBRARIES KIND". Ranks meet by files in the directory; MPI's library is looked for in LIBRARIES.
//
// Kinds: "zero-copy" and "staged", hbm within a node, on memory of the segment and on other memory;
// "mpi", hbm over MPI.
//
//   ready               answers once all have met
//   prepare BYTES TYPE  memory for it, and a sum that is checked
//   run SAMPLES CALLS   all ranks are told the same
#include <unistd.h>

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
#include "communicator/mpi/channel.h"
#include "communicator/mpi/communicator.h"
#include "communicator/mpi/library.h"
#include "communicator/shm/join.h"
#include "communicator/shm/neighbour_listener.h"
#include "communicator/shm/neighbours.h"
#include "communicator/shm/reduction.h"
#include "meeting.h"
#include "memory/segment.h"
#include "memory/staging.h"
#include "program.h"
#include "progress/operation_queue.h"

namespace hbm::bench {
namespace {

constexpr uint64_t kStagingBytes = 64 << 20;
constexpr memory::Policy kPolicy = memory::Policy::kPreferred;

bool crowded(const RankPlace& place) { return place.size > sysconf(_SC_NPROCESSORS_ONLN); }

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
  explicit Queued(const RankPlace& place, std::function<void()> wake = {})
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
  WithinNode(const RankPlace& place, bool zero_copy) : WithinNode(place, zero_copy, join(place)) {}

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
  WithinNode(const RankPlace& place, bool zero_copy, std::shared_ptr<shm::ShmGroup> group)
      : Queued(place, [group] { group->wake(); }),
        zero_copy_(zero_copy),
        group_(std::move(group)) {}

  static std::shared_ptr<shm::ShmGroup> join(const RankPlace& place) {
    const auto segment = memory::process_segment(kPolicy);
    shm::NeighbourListener listener;
    const auto rendezvous = meet(place, [&](bootstrap::Member& self) {
      self.segment = memory::policy_name(kPolicy);
      self.listener = listener.name();
    });
    const auto neighbours = shm::explore(rendezvous, listener, segment, kChunk);
    return shm::join(rendezvous, segment, neighbours, kChunk, crowded(place), /*threads=*/1);
  }

  const bool zero_copy_;
  const std::shared_ptr<shm::ShmGroup> group_;
};

std::shared_ptr<mpi::Channel> connect(const RankPlace& place) {
  const auto channel = std::make_shared<mpi::Channel>();
  channel->rank = place.rank;
  channel->size = place.size;
  channel->group = "the benchmark";
  channel->chunk_bytes = mpi::chunk_bytes(kStagingBytes, place.size);
  channel->staging = memory::process_staging(kPolicy, kStagingBytes);
  if (place.size > 1) channel->communicator = connect_by_mpi(place).communicator;
  return channel;
}

class OverMpi final : public Queued {
 public:
  explicit OverMpi(const RankPlace& place) : Queued(place), communicator_(connect(place)) {}

  void allreduce(void* data, size_t count, Dtype dtype) override {
    run(*communicator_.allreduce(next(), data, data, count, dtype, ReduceOp::kSum));
  }

 private:
  mpi::MpiCommunicator communicator_;
};

std::unique_ptr<Way> make_way(const std::string& kind, const RankPlace& place) {
  if (kind == "zero-copy" || kind == "staged") {
    return std::make_unique<WithinNode>(place, kind == "zero-copy");
  }
  if (kind == "mpi") return std::make_unique<OverMpi>(place);
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
  Rank(RankPlace place, std::string kind) : place_(std::move(place)), kind_(std::move(kind)) {}

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
  const RankPlace place_;
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
  hbm::mpi::set_search_path({argv[4]});
  Rank rank({argv[1], std::stoi(argv[2]), std::stoi(argv[3])}, argv[5]);
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
