#include "mpi_ranks.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "base/error.h"
#include "bootstrap/rendezvous.h"
#include "communicator/mpi/connect.h"
#include "communicator/mpi/library.h"
#include "file_store.h"

namespace hbm::communicator::mpi {
namespace {

constexpr int kNoLibrary = 77;
constexpr uint64_t kStagingBytes = 64 << 20;

void prepare_process() {
#if defined(__SANITIZE_THREAD__)
  // UCX would patch functions that ThreadSanitizer has replaced, and crash.
  setenv("UCX_MEM_EVENTS", "n", 1);
#endif
  set_search_path({HBM_MPI_LIB_DIR});
}

bool has_library() {
  const int status = run_forked([] {
    prepare_process();
    try {
      library();
    } catch (const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      _exit(kNoLibrary);
    }
  });
  return !WIFEXITED(status) || WEXITSTATUS(status) != kNoLibrary;
}

void expect_unnamed_segments() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/dev/shm/") == std::string::npos) continue;
    EXPECT_NE(line.find("(deleted)"), std::string::npos) << line;
  }
}

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = "missing ranks:";
  for (const int rank : ranks) text += " " + std::to_string(rank);
  return text;
}

}  // namespace

Group::Group(const std::filesystem::path& directory, const std::string& name, int rank, int size,
             size_t chunk_bytes)
    : channel(std::make_shared<Channel>()),
      communicator(std::make_shared<MpiCommunicator>(channel)) {
  const auto deadline = progress::Clock::now() + kTimeout;
  std::filesystem::create_directories(directory / name);
  const auto store = std::make_shared<FileStore>(directory / name);
  const auto rendezvous = bootstrap::meet(store, rank, size, "group " + name, deadline, [&] {
    return bootstrap::introduce("test", chunk_bytes);
  });
  channel->rank = rank;
  channel->size = size;
  channel->group = "group " + name;
  channel->chunk_bytes = chunk_bytes;
  channel->staging = memory::StagingPool::make(std::make_shared<memory::Heap>(memory::Policy::kDdr),
                                               kStagingBytes);
  if (size > 1) {
    const MpiConnection connection = connect(rendezvous, {});
    channel->communicator = connection.communicator;
    channel->group_number = connection.group_number;
  }
  const bool oversubscribed = size > sysconf(_SC_NPROCESSORS_ONLN);
  collectives = progress::OperationQueue::create(progress::OperationQueue::Order::kOrdered,
                                                 oversubscribed, {{}, {}, {}, {}, name_ranks});
  transfers = progress::OperationQueue::create(progress::OperationQueue::Order::kUnordered,
                                               oversubscribed, {{}, {}, {}, {}, name_ranks});
}

Group::~Group() {
  collectives->stop();
  transfers->stop();
}

std::exception_ptr Group::run(std::unique_ptr<progress::Operation> operation,
                              std::chrono::milliseconds timeout) {
  const auto request = collectives->enqueue(std::move(operation), timeout, {});
  collectives->launch(request, progress::Mode::kSync);
  return request->error();
}

void run_ranks(int size, const std::function<void(const Rank&)>& body,
               const std::set<int>& killed) {
  static const bool runs = has_library();
  if (!runs) GTEST_SKIP() << "no MPI library: install PyPI's mpich or the system's";
  run_forked_ranks(
      size,
      [&](const ForkedRank& rank) {
        prepare_process();
        body({rank});
        expect_unnamed_segments();
      },
      killed);
}

}  // namespace hbm::communicator::mpi
