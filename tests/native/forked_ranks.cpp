#include "forked_ranks.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <system_error>
#include <vector>

namespace hbm {
namespace {

constexpr unsigned kLongestRun = 120;  // seconds

pid_t start(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(kLongestRun);
  try {
    body();
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  std::fflush(nullptr);
  // Exits without the destructors of static objects: some of these must exist until the process
  // ends.
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

int end_of(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
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

}  // namespace

int run_forked(const std::function<void()>& body) { return end_of(start(body)); }

void run_forked_ranks(int size, const std::function<void(const ForkedRank&)>& body,
                      const std::set<int>& killed) {
  const TemporaryDirectory shared;
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(start([&] { body({rank, size, shared.path}); }));
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

}  // namespace hbm
