// Sleeping on a word of memory that processes share.
//
// Threads: any thread of any process that maps the word. A waiter that was woken, or was not put to
// sleep because the word had changed, looks again itself: waking up says nothing more.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace hbm {

// Sleeps while `word` is `expected`, at most for `most`.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds most) noexcept;

// Wakes all who sleep on `word`.
void futex_wake(std::atomic<uint32_t>& word) noexcept;

}  // namespace hbm
