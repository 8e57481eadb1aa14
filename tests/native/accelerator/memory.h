// The memory of the test accelerator.
//
// Device memory is mapped twice: tensors have addresses that the host cannot touch (PROT_NONE), and
// streams use the other mapping. When a block is freed, a task on the stream of its allocation
// overwrites it. The block may be allocated again immediately, unless record_use() has recorded
// other streams as its users.
//
// This file counts pinned host memory, and two violations. The first is to free or unpin a block
// that a stream's copy still uses; a freed block is then kept. The second is to queue a copy that
// shares pinned memory with an unfinished copy, if one of the two copies writes it.
//
// Threads: every function may be called from any thread.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace late {

inline constexpr int kDevices = 2;

// Returns the address at which streams access `device_address`.
std::byte* by_stream(const void* device_address);

// Returns the device that has this address, or -1 if no device has it.
int device_of(const void* address);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Records `stream` as a user of the block. Once freed, the block is allocated again only after
// `stream` has run the tasks that were queued on it when the block was freed.
void record_use(const void* device_address, const c10::Stream& stream);

// begin_use_of_host() is called when a copy from or to host memory is queued, and end_use_of_host()
// when this copy is done. `writes`: the copy writes the host memory.
void begin_use_of_host(const void* address, size_t bytes, bool writes);
void end_use_of_host(const void* address, size_t bytes);

bool is_pinned(const void* address);

struct PinnedCounts {
  int64_t in_use = 0;          // blocks
  int64_t allocated = 0;       // blocks, since the start
  int64_t freed_in_copy = 0;   // violations
  int64_t reused_in_copy = 0;  // violations
  int64_t registered = 0;      // blocks that lateHostRegister() has pinned
};
PinnedCounts pinned_counts();
// Returns the number of allocations and registrations of pinned memory by threads whose current
// device was `device`.
int64_t pinned_under(int device);

// From now on, allocations and registrations of pinned memory fail if `fails` is true.
void fail_pinned(bool fails);

// Pins existing memory, as cudaHostRegister does. Returns 0, or 1 if it fails.
extern "C" int lateHostRegister(void* block, size_t bytes, unsigned flags);
extern "C" int lateHostUnregister(void* block);

}  // namespace late
