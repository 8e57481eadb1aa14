#include "mpi_ranks.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <utility>
#include <vector>

#include "base/error.h"
#include "file_store.h"
#include "mpi/collectives.h"
#include "mpi/library.h"
#include "mpi/meeting.h"

namespace hbm::mpi {
namespace {

constexpr unsigned kLongestRun = 120;  // seconds
constexpr int kNoLibrary = 77;
constexpr uint64_t kStagingBytes = 64 << 20;

// Every test is bounded by a signal, and no rank outlives the test program.
pid_t start(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
#if defined(__SANITIZE_THREAD__)
  // UCX would patch functions that ThreadSanitizer has replaced, and crash.
  setenv("UCX_MEM_EVENTS", "n", 1);
#endif
  alarm(kLongestRun);
  int status = 1;
  try {
    status = body();
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  std::fflush(nullptr);
  _exit(status);  // without destructors: MPI stays up until the process ends
}

int end_of(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

bool has_library() {
  const int status = end_of(start([] {
    set_search_path({HBM_MPI_LIB_DIR});
    try {
      library();
    } catch (const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return kNoLibrary;
    }
    return 0;
  }));
  return !WIFEXITED(status) || WEXITSTATUS(status) != kNoLibrary;
}

void expect_unnamed_segments() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/dev/shm/") == std::string::npos) continue;
    EXPECT_NE(line.find("(deleted)"), std::string::npos) << line;
  }
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = std::filesystem::temp_directory_path() / "hbm_ranks_XXXXXX";
    if (mkdtemp(name.data()) == nullptr) {
      throw std::system_error(errno, std::generic_category(), name);
    }
    path = name;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::filesystem::path path;
};

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = "missing ranks:";
  for (const int rank : ranks) text += " " + std::to_string(rank);
  return text;
}

}  // namespace

Group::Group(const std::filesystem::path& directory, const std::string& name, int rank, int size,
             size_t chunk_bytes)
    : channel(std::make_shared<Channel>()) {
  const Deadline deadline = Clock::now() + kPatience;
  std::filesystem::create_directories(directory / name);
  const auto store = std::make_shared<FileStore>(directory / name);
  const Meeting meeting = meet(*store, introduce("test", chunk_bytes, /*needs_mpi=*/size > 1), rank,
                               size, "group " + name, deadline);
  channel->rank = rank;
  channel->size = size;
  channel->group = "group " + name;
  channel->chunk_bytes = chunk_bytes;
  channel->staging = memory::StagingPool::make(
      std::make_shared<memory::Heap>(memory::Policy::kDdr, 0), kStagingBytes);
  if (size > 1) channel->communicator = connect(store, meeting.members, rank, name, deadline);
  const bool crowded = size > sysconf(_SC_NPROCESSORS_ONLN);
  collectives = Queue::create(Queue::Order::kOrdered, crowded, {{}, {}, name_ranks});
  transfers = Queue::create(Queue::Order::kUnordered, crowded, {{}, {}, name_ranks});
}

Group::~Group() {
  collectives->stop();
  transfers->stop();
}

std::exception_ptr Group::run(std::unique_ptr<Operation> operation,
                              std::chrono::milliseconds timeout) {
  const auto ticket = collectives->enqueue(std::move(operation), timeout, {});
  collectives->launch(ticket, Mode::kSync);
  return ticket->error();
}

void run_ranks(int size, const std::function<void(const Rank&)>& body,
               const std::set<int>& killed) {
  static const bool runs = has_library();
  if (!runs) GTEST_SKIP() << "no MPI library: install PyPI's mpich or the system's";
  const TemporaryDirectory shared;
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(start([&] {
      set_search_path({HBM_MPI_LIB_DIR});
      body({rank, size, shared.path});
      expect_unnamed_segments();
      return testing::Test::HasFailure() ? 1 : 0;
    }));
    ASSERT_GE(ranks.back(), 0);
  }
  for (int rank = 0; rank < size; ++rank) {
    const int status = end_of(ranks[static_cast<size_t>(rank)]);
    if (killed.contains(rank)) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "rank " << rank;
    } else {
      EXPECT_FALSE(WIFSIGNALED(status)) << "rank " << rank << ": signal " << WTERMSIG(status);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
    }
  }
}

}  // namespace hbm::mpi
