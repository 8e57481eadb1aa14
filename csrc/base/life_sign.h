// A sign in shared memory by which other processes see the death of this process early.
//
// When a process dies, the kernel first frees its memory. Only then it makes the pidfds of the
// process readable, and closes its sockets. This takes long if the process is large. The kernel
// marks the signs before it frees the memory.
//
// The signs are robust futexes of one thread, the keeper. It only sleeps, so it ends with the
// process: when the process is killed, exits, or executes another program. The kernel marks the
// signs when the keeper ends. The code of other threads may still run for microseconds. Their
// system calls, and transfers by devices, may continue until the process has ended.
//
// The signs show nothing if the keeper cannot start, or on a kernel without robust futexes. Other
// processes then see the death by the pidfd. The kernel marks the newest 2,048 signs.
//
// Threads: any thread may call every function.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstdint>

namespace hbm {

// Other processes map the sign, and only read it. Initialise it with zeros.
struct LifeSign {
  robust_list link;              // to the next sign of this process; for the kernel
  std::atomic<uint32_t> holder;  // the thread id of the keeper; 0: no keeper. The kernel marks it
};

// Returns true if the process that has put up the sign is dead.
inline bool shows_death(const LifeSign& sign) noexcept {
  return (sign.holder.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
}

// Puts up a sign of this process. The first call starts the keeper, which soon takes the sign. Call
// take_down() before the memory of the sign is freed.
void put_up(LifeSign& sign);

// Takes down a sign of this process. Does nothing in a forked child, which has no such sign.
void take_down(LifeSign& sign) noexcept;

}  // namespace hbm
