// Files in memory (memfds) that other processes are given by their descriptor.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/descriptor.h"

namespace hbm::memory {

// Empty, closed on exec; only its owner's processes can open it anew through /proc.
// Throws Error(kUnavailable) when the kernel gives none, and says so when descriptors have run out.
Descriptor make_shared_file(const std::string& name);

// REQUIRES: bytes is a multiple of the page.
// Throws Error(kExhausted) when the size of files (RLIMIT_FSIZE) is too limited for it.
void set_size(const Descriptor& file, uint64_t bytes);

// For good: whoever maps it can rely on its size, and will make no access past a new end.
// Throws Error(kUnavailable) when the kernel refuses.
void fix_size(const Descriptor& file);

// What to say when a segment of so many bytes cannot be had because `call` failed with `error`.
// Throws Error(kExhausted), which names the limits of this process.
[[noreturn]] void refuse_size(uint64_t bytes, const char* call, int error);

}  // namespace hbm::memory
