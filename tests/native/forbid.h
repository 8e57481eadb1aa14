// Forbids system calls, as the seccomp profile of a container does.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace hbm {

// Makes a system call fail with EPERM in this thread from now on. Returns false if seccomp does not
// work.
inline bool forbid(long call) {
  std::array<sock_filter, 4> program = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{.len = program.size(), .filter = program.data()};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0);
  return syscall(call, 0, 0, 0, 0, 0, 0) != 0 && errno == EPERM;
}

// Returns true if forbid() works. Tries it in a child process.
inline bool can_forbid(long call) {
  const pid_t child = fork();
  if (child == 0) _exit(forbid(call) ? 0 : 1);
  int status = 0;
  return waitpid(child, &status, 0) == child && status == 0;
}

}  // namespace hbm
