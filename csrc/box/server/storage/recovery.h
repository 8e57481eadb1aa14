// Carries out, once and entirely, the operations that a killed process had in progress.
//
// Threads: one, before anyone uses the records or the segments. It may itself be killed and begun
// again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "box/server/storage/records.h"

namespace hbm::box {

struct Memory {
  std::byte* base = nullptr;  // null: the segment is not there
  uint64_t size = 0;
};

// The memory of the segment with a serial number (segment.h).
using FindMemory = std::function<Memory(uint64_t serial)>;

// Afterwards nothing is in progress, and each session's `applied` says what is done. An operation
// whose record or whose segments are damaged or missing is dropped, which the log says, and ends
// its request with kInternal.
void recover(Records& records, const FindMemory& find);

}  // namespace hbm::box
