// The memory of the test accelerator.
//
// Device memory is mapped twice: tensors have addresses that the host cannot touch (PROT_NONE), and
// streams use the other mapping. A freed block is overwritten by the stream of its allocation. It
// is allocated again immediately, unless other streams were recorded as its users.
//
// Pinned host memory is counted. Freeing it, or taking the pin away, while a copy of a stream uses
// it is a violation, which is counted too; the block is then kept. So is a copy to pinned memory
// that another copy uses, queued before that one is over.
//
// Threads: every function may be called from any thread.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace late {

inline constexpr int kDevices = 2;

// The address at which streams reach `device_address`.
std::byte* by_stream(const void* device_address);

// The device that has this address; -1 for none.
int device_of(const void* address);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Makes the block wait for `stream` before it is given out again.
void record_use(const void* device_address, const c10::Stream& stream);

// A copy of a stream that uses host memory is queued, or over.
void begin_use_of_host(const void* address, size_t bytes, bool writes);
void end_use_of_host(const void* address, size_t bytes);

bool is_pinned(const void* address);

struct PinnedCounts {
  int64_t in_use = 0;          // blocks
  int64_t allocated = 0;       // blocks, since the start
  int64_t freed_in_copy = 0;   // violations
  int64_t reused_in_copy = 0;  // violations
  int64_t registered = 0;      // blocks of others that are pinned
};
PinnedCounts pinned_counts();
// Allocations and registrations of pinned memory while `device` was the calling thread's current.
int64_t pinned_under(int device);

// The next allocations and registrations of pinned memory fail, while `fails`.
void fail_pinned(bool fails);

// Pins memory that exists, as cudaHostRegister does: 0, or 1 if it fails.
extern "C" int lateHostRegister(void* block, size_t bytes, unsigned flags);
extern "C" int lateHostUnregister(void* block);

}  // namespace late
