// Measures the latency of memory.
//
// Threads: every function may be called from any thread.
#pragma once

#include <cstddef>
#include <memory>

namespace hbm::memory {

// Returns a block of private memory on a NUMA node, in huge pages if the kernel gives them. All its
// pages are resident. Throws Error(kExhausted) if the block exceeds the room of the node or of the
// machine (room.h), and PlacingError (placement.h) if the kernel refuses to place memory.
std::shared_ptr<void> block_on_node(int node, size_t bytes);

// Returns the mean seconds of a load whose address depends on the load before it. Up to 4 million
// loads visit different cache lines of the block, in random order. The processor's caches have a
// part of the block, so take one of at least 8 times their size. Overwrites the block. REQUIRES: at
// least two cache lines.
double load_seconds(void* block, size_t bytes);

}  // namespace hbm::memory
