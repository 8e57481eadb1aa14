// The memory of the test accelerator.
//
// Device memory is mapped twice: tensors have addresses that the host cannot touch (PROT_NONE), and
// streams use the other mapping. A freed block is overwritten by the stream of its allocation. It
// may be allocated again immediately, unless record_use() has recorded other streams as its users.
//
// Pinned host memory is counted, and so are two violations. The first is to free or unpin a block
// that a copy of a stream uses; the block is then kept. The second is to queue a copy to pinned
// memory that an earlier copy still uses.
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

// Returns the device that has this address; -1 if none has.
int device_of(const void* address);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Records `stream` as a user of the block. After the block is freed, it is not allocated again
// before `stream` has run the tasks that it had at that time.
void record_use(const void* device_address, const c10::Stream& stream);

// Called when a copy of a stream that uses host memory is queued, and when the copy is over.
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
