// How much memory may still be taken.
//
// The kernel kills a process that touches a page of a full node it is bound to, so a heap asks here
// before it lets a page be touched. Figures are the kernel's, read at each call (about 15 us a
// node); a container's own memory limit is not in them.
//
// Threads: every function may be called from any thread. Each throws Error(kUnavailable) when the
// kernel's figures cannot be read.
#pragma once

#include <cstdint>
#include <vector>

namespace hbm::memory {

// Bytes that may be taken from the nodes: their free bytes less a margin on each (32 MiB and 1/128
// of the node) that stays for the kernel and for processes that allocate at the same moment. Under
// `interleave` the fullest node counts for all, because pages go to each in turn.
uint64_t room_on(const std::vector<int>& nodes, bool interleave);

// Bytes that ordinary memory can give, by the kernel's own estimate over the whole machine.
uint64_t machine_room();

// The same for pages of a memfd: the kernel counts them against vm.overcommit_memory only
// when they are touched, and then kills. Private memory is counted when it is mapped.
uint64_t shared_room();

}  // namespace hbm::memory
