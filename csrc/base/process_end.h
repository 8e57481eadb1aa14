// The end of the process while other threads still run.
//
// One thread ends the process: it finalises the interpreter, and then the libraries clean up. Other
// threads must have stopped using Python, PyTorch's objects and MPI by then. A join could hang,
// because a thread may wait for another rank. A thread cannot return to Python either: a finalised
// interpreter ends or hangs each thread that asks for Python's lock. So threads park: a parked
// thread sleeps until the process is gone, and no destructor runs on its stack.
// docs/design/process-end.md lists all threads.
//
// A forked child ends separately: process_ends() is false in a child that was forked while its
// parent ended.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <atomic>

namespace hbm {

namespace process_end {

// True once this process, or a process that it was forked from, has begun to end. Sequentially
// consistent: see ShortSection.
extern std::atomic<bool> begun;

bool here() noexcept;
bool elsewhere() noexcept;

}  // namespace process_end

// Returns true once the end of this process has begun, by end_process() or
// end_process_of_main_thread().
inline bool process_ends() noexcept { return process_end::begun.load() && process_end::here(); }

// Returns true if another thread has begun to end the process.
inline bool must_park() noexcept { return process_end::begun.load() && process_end::elsewhere(); }

// Sleeps for ever. REQUIRES: the calling thread holds no lock that the end of the process takes.
[[noreturn]] void park() noexcept;

// Returns the calling thread's flag, which park() sets (release). Valid while the thread lives.
const std::atomic<bool>& parked_here() noexcept;

// Parks the calling thread if it must park. REQUIRES: as park().
inline void park_at_process_end() noexcept {
  if (must_park()) park();
}

// A short section of code in which a thread uses MPI. MPI is finalised at the end of the process.
// So end_process() first waits until all threads that have not parked have left their sections, but
// at most 10 s (kFinalSectionTimeout).
//
// The thread calls process_ends() or must_park() after it has begun the section. Beginning a
// section raises a count. end_process() first sets the flag that these functions read, then reads
// the count. All four accesses are sequentially consistent. So either the thread sees that the
// process ends, or end_process() sees the section.
class ShortSection {
 public:
  ShortSection() noexcept;
  ~ShortSection();
  ShortSection(const ShortSection&) = delete;
  ShortSection& operator=(const ShortSection&) = delete;
};

// Registers `stop`, which end_process() calls once, even if it is registered repeatedly. exit()
// calls end_process() if the interpreter has not.
void at_process_end(void (*stop)());

// Makes the calling thread the one that ends the process, calls all functions that were passed to
// at_process_end(), and waits for short sections. A second call by the same thread does nothing.
// REQUIRES: the caller does not hold Python's lock.
void end_process() noexcept;

// Does the same as end_process(), but makes the main thread the one that ends the process. Called
// if the main thread began to end the process before this library was loaded. The caller may be
// another thread, which loads the library.
void end_process_of_main_thread() noexcept;

}  // namespace hbm
