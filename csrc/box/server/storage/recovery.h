// Executes, once and entirely, the operations that a killed process had in progress.
//
// Threads: one, before anyone uses the records or the segments. It may itself be killed and begun
// again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "box/server/storage/bound_operation.h"
#include "box/server/storage/records.h"

namespace hbm::box {

struct Memory {
  std::byte* base = nullptr;  // null: the segment is not there
  uint64_t size = 0;
};

// The memory of the segment with a serial number (segment.h).
using FindMemory = std::function<Memory(uint64_t serial)>;

class Recovery {
 public:
  // Looks, and changes nothing.
  // Throws Error(kUnavailable) when a record that is sound by its checksum makes no sense. With
  // `lenient`, for files of which a crash of the host may have lost anything, such an operation is
  // dropped later.
  Recovery(Records& records, const FindMemory& find, bool lenient);

  // Afterwards nothing is in progress, and each session's `applied` says what is done. An operation
  // whose segments are gone ends its request with kInternal; so does one that is dropped, which the
  // log says.
  void execute();

 private:
  struct Begun {
    Recorded recorded;
    SessionRecord* session;  // none: it has ended
    BoundOperation operation;
    const char* dropped = nullptr;  // why
    bool done = false;              // only the record was left
  };
  Begun look(const Recorded& recorded, const FindMemory& find) const;
  void drop(const Begun& one);

  Records& records_;
  std::vector<Begun> begun_;
};

}  // namespace hbm::box
