// The common part of the tests of memory. memkind reads its environment once per process, so each
// test runs its body in a child process. The child's environment names node 0 as HBM, or names no
// HBM.
//
// Include this file in one source file of a program only, because it defines ThreadSanitizer's hook
// for suppressions.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <vector>

#include "memory/placement.h"
#include "memory/policy.h"
#include "memory/system_memory.h"
#include "memory/topology.h"

#if defined(__SANITIZE_THREAD__)
// Around a fork, memkind's jemalloc locks all its mutexes. They are more than ThreadSanitizer can
// follow. In the child, jemalloc initialises the mutexes again by code that ThreadSanitizer does
// not know. So the first line makes ThreadSanitizer ignore calls from memkind. The second line does
// this for the last unlock: memkind's fork handler makes it by a tail call, so it seems to come
// from __run_postfork_handlers. ThreadSanitizer then no longer sees that memkind hands a block from
// one owner to the next, and would report a race in the next owner's touch(). The third line
// suppresses this report.
extern "C" const char* __tsan_default_suppressions() {
  return "called_from_lib:libmemkind.so\n"
         "mutex:__run_postfork_handlers\n"
         "race_top:^touch$\n";
}
#endif

namespace hbm::memory {

inline constexpr size_t kKiB = 1024;
inline constexpr size_t kMiB = 1024 * kKiB;
inline constexpr size_t kGiB = 1024 * kMiB;
inline const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// True if the tests may limit and count this process's address space. False under sanitizers,
// because their shadow memory takes address space.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSpaceIsOurs = false;
#else
inline constexpr bool kSpaceIsOurs = true;
#endif

inline const std::vector<Policy> kAllPolicies = {Policy::kPreferred, Policy::kBind,
                                                 Policy::kInterleave, Policy::kDdr};

inline bool is_strict(Policy policy) {
  return policy == Policy::kBind || policy == Policy::kInterleave;
}

// Runs `body` in a child process. The test fails if `body` fails, or if a signal ends the child,
// such as the kernel's kill for lack of memory.
inline void in_child(const std::function<void()>& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    body();
    std::fflush(stdout);
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_FALSE(WIFSIGNALED(status)) << "killed by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

inline void with_hbm(const std::function<void()>& body) {
  in_child([&] {
    setenv("MEMKIND_HBW_NODES", "0", 1);
    body();
  });
}

// Runs the body with no HBM named. Does not run it on a machine with HBM, because HBM cannot be
// hidden.
inline void without_hbm(const std::function<void()>& body) {
  in_child([&] {
    unsetenv("MEMKIND_HBW_NODES");
    if (!discover().hbm_available) body();
  });
}

inline uint64_t bytes_anywhere(const void* address, size_t bytes) {
  uint64_t sum = 0;
  for (const auto& [node, there] : where(address, bytes)) sum += there;
  return sum;
}

// Returns a number of bytes that node 0 cannot give, even if none of its memory is in use.
inline size_t too_much() { return MemInfo::of_node(0).bytes("MemTotal"); }

// Returns the bytes of address space in use.
inline uint64_t mapped_bytes() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * kPage;
}

// Sets a soft limit of this process. Later children inherit it.
inline void set_limit(int resource, uint64_t bytes) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(resource, &limit), 0);
  limit.rlim_cur = bytes;
  ASSERT_EQ(setrlimit(resource, &limit), 0);
}

}  // namespace hbm::memory
