// One rank of a group, which reports the nodes of the memory that collectives use.
//
//   guest_collectives DIRECTORY RANK SIZE LIBRARIES POLICY BYTES
//
// Ranks are processes that meet by files in DIRECTORY. They search for MPI's library in LIBRARIES.
// They run a broadcast, a gather and an allreduce on BYTES of float32. They run each collective
// three times: within the node on a tensor of the rank's segment, within the node on plain memory,
// and over MPI on plain memory. For each collective, a rank makes three reports (pages.h), with
// names like "allreduce rank 0 tensor":
//
//   tensor   the tensor of the segment
//   segment  all of the segment: the tensor, and the slots that plain memory goes through
//   mpi      the buffers that were handed to MPI
//
// HBMCOMM_BIND binds the ranks. The linker puts wrappers in the place of Comm::isend() and
// Comm::irecv() (CMakeLists.txt). A wrapper notes the buffer and passes the call on.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "communicator/connect/connect.h"
#include "communicator/mpi/communicator.h"
#include "communicator/mpi/library.h"
#include "file_store.h"
#include "guest/pages.h"
#include "memory/policy.h"
#include "memory/segment.h"
#include "progress/operation_queue.h"

namespace hbm::communicator::mpi {
namespace {

std::mutex mutex;                      // guards `handed`
std::map<const void*, size_t> handed;  // address -> bytes, the most of all calls

void note(const void* data, size_t bytes) {
  const std::lock_guard lock(mutex);
  size_t& most = handed[data];
  most = std::max(most, bytes);
}

}  // namespace

// The linker's names for the functions (__real_) and for their wrappers (__wrap_).
extern "C" {
Request __real__ZN3hbm12communicator3mpi4Comm5isendEPKvmii(Comm* comm, const void* data,
                                                           size_t bytes, int peer, int tag);
Request __real__ZN3hbm12communicator3mpi4Comm5irecvEPvmii(Comm* comm, void* data, size_t bytes,
                                                          int peer, int tag);

Request __wrap__ZN3hbm12communicator3mpi4Comm5isendEPKvmii(Comm* comm, const void* data,
                                                           size_t bytes, int peer, int tag) {
  note(data, bytes);
  return __real__ZN3hbm12communicator3mpi4Comm5isendEPKvmii(comm, data, bytes, peer, tag);
}

Request __wrap__ZN3hbm12communicator3mpi4Comm5irecvEPvmii(Comm* comm, void* data, size_t bytes,
                                                          int peer, int tag) {
  note(data, bytes);
  return __real__ZN3hbm12communicator3mpi4Comm5irecvEPvmii(comm, data, bytes, peer, tag);
}
}

}  // namespace hbm::communicator::mpi

namespace hbm::bench {
namespace {

constexpr std::chrono::minutes kPatience{5};
constexpr uint64_t kStagingBytes = 64 << 20;
constexpr int kRoot = 0;

struct GuestRank {
  std::filesystem::path directory;
  int rank;
  int size;
  memory::Policy policy;
};

// A process group without PyTorch: its connection, and the queue of its collectives.
class GuestGroup {
 public:
  GuestGroup(const GuestRank& of, const std::string& transport)
      : connection_(connect_as(of, transport)),
        queue_(progress::OperationQueue::create(
            progress::OperationQueue::Order::kOrdered, connection_.oversubscribed,
            {{},
             {},
             {},
             [made = connection_.communicator] { made->wake(); },
             [](const std::vector<int>&) { return std::string("missing ranks"); }})) {}
  ~GuestGroup() { queue_->stop(); }
  GuestGroup(const GuestGroup&) = delete;
  GuestGroup& operator=(const GuestGroup&) = delete;

  communicator::Communicator& communicator() const { return *connection_.communicator; }
  memory::SharedSegment& segment() const { return *connection_.segment; }

  // Runs the operation to its end. Throws the operation's error.
  void run(communicator::OperationPtr operation) {
    const auto request = queue_->enqueue(std::move(operation), kPatience, {});
    queue_->launch(request, progress::Mode::kSync);
    if (request->error()) std::rethrow_exception(request->error());
  }

  uint64_t next() { return ++sequence_; }

 private:
  static communicator::connect::GroupConnection connect_as(const GuestRank& of,
                                                           const std::string& transport) {
    communicator::connect::GroupSetup setup;
    std::filesystem::create_directories(of.directory / transport);
    setup.store = std::make_shared<FileStore>(of.directory / transport);
    setup.job_store = std::make_shared<FileStore>(of.directory);
    setup.heartbeat = kPatience;
    setup.rank = of.rank;
    setup.size = of.size;
    setup.group = "the group of " + transport;
    setup.deadline = std::chrono::steady_clock::now() + kPatience;
    setup.version = "guest";
    setup.transport = bootstrap::parse_transport(transport, "transport");
    setup.policy = of.policy;
    setup.staging_bytes = kStagingBytes;
    return communicator::connect::connect(setup);
  }

  const communicator::connect::GroupConnection connection_;
  const std::shared_ptr<progress::OperationQueue> queue_;
  uint64_t sequence_ = 0;
};

// Runs a collective on `data`, in which the elements of rank r are r + 1. Checks the root's result.
void run_collective(const std::string& name, const GuestRank& of, GuestGroup& group,
                    std::span<float> data) {
  std::ranges::fill(data, static_cast<float>(of.rank + 1));
  communicator::Communicator& communicator = group.communicator();
  const size_t share = data.size() / static_cast<size_t>(of.size);
  const auto own = static_cast<size_t>(of.rank) * share;
  if (name == "broadcast") {
    group.run(
        communicator.broadcast(group.next(), data.data(), data.size(), Dtype::kFloat32, kRoot));
  } else if (name == "gather") {
    std::vector<communicator::Sink> parts;
    for (size_t at = 0; of.rank == kRoot && at < data.size(); at += share) {
      parts.push_back({data.data() + at, share});
    }
    group.run(communicator.gather(group.next(), {data.data() + own, share}, parts, Dtype::kFloat32,
                                  kRoot));
  } else {
    group.run(communicator.allreduce(group.next(), data.data(), data.data(), data.size(),
                                     Dtype::kFloat32, ReduceOp::kSum));
  }
  if (of.rank != kRoot) return;
  for (size_t i = 0; i < data.size(); ++i) {
    const size_t expected = name == "broadcast" ? 1
                            : name == "gather"  ? i / share + 1
                                                : static_cast<size_t>(of.size * (of.size + 1) / 2);
    if (data[i] != static_cast<float>(expected)) {
      throw Error(ErrorKind::kMismatch,
                  "element " + std::to_string(i) + " of the " + name + " is wrong");
    }
  }
}

void report_collectives(const GuestRank& of, size_t bytes) {
  GuestGroup within(of, "shm");
  GuestGroup over(of, "mpi");
  std::vector<float> plain(bytes / sizeof(float));
  for (const std::string name : {"broadcast", "gather", "allreduce"}) {
    const std::string who = name + " rank " + std::to_string(of.rank) + " ";
    auto* const tensor = static_cast<float*>(within.segment().allocate(bytes));
    run_collective(name, of, within, {tensor, plain.size()});
    run_collective(name, of, within, plain);
    report(who + "tensor", {{tensor, bytes}}, "");
    report(who + "segment", {{within.segment().base(), within.segment().size()}}, "");
    within.segment().free(tensor);

    communicator::mpi::handed.clear();
    run_collective(name, of, over, plain);
    over.run(over.communicator().barrier(over.next()));
    std::vector<Block> blocks;
    for (const auto& [data, most] : communicator::mpi::handed) blocks.push_back({data, most});
    report(who + "mpi", blocks, "");
  }
  within.run(within.communicator().barrier(within.next()));
}

}  // namespace
}  // namespace hbm::bench

int main(int argc, char** argv) {
  using namespace hbm;
  if (argc != 7) {
    std::fprintf(stderr, "guest_collectives DIRECTORY RANK SIZE LIBRARIES POLICY BYTES\n");
    return 2;
  }
  try {
    communicator::mpi::set_search_path({argv[4]});
    bench::report_collectives(
        {argv[1], std::stoi(argv[2]), std::stoi(argv[3]), memory::parse_policy(argv[5])},
        std::stoul(argv[6]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %s: %s\n", argv[2], error.what());
    return 1;
  }
  return 0;
}
