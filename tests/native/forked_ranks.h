// Ranks that are processes, forked from a test that has no threads.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <set>

namespace hbm {

struct ForkedRank {
  int rank;
  int size;
  std::filesystem::path directory;  // holds the files that the ranks share (FileStore)
};

// Runs `body` in a child process and returns the child's wait status. The exit code is 0 if body()
// ended without an exception and no check in it failed. The child is killed when this process ends,
// or after two minutes.
int run_forked(const std::function<void()>& body);

// Runs `body` in `size` processes. A failure in a process fails the test. The ranks in `killed`
// must end by SIGKILL; all others must reach the end of `body`.
void run_forked_ranks(int size, const std::function<void(const ForkedRank&)>& body,
                      const std::set<int>& killed = {});

}  // namespace hbm
