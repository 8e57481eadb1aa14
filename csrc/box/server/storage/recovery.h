// Completes, exactly once, the operations that a killed process had in progress.
//
// Threads: one, before any other thread uses the records or the segments. If the process is killed
// during the recovery, another process can begin it again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "box/server/storage/bound_operation.h"
#include "box/server/storage/records.h"

namespace hbm::box::server::storage {

struct Memory {
  std::byte* base = nullptr;  // null: the segment does not exist
  uint64_t size = 0;
};

// Returns the memory of the segment with a serial number (segment.h).
using FindMemory = std::function<Memory(uint64_t serial)>;

class Recovery {
 public:
  // Inspects the records, and changes nothing. Throws Error(kUnavailable) if the record of an
  // operation is inconsistent. `lenient`: true if a crash of the host may have damaged the files.
  // Then the constructor does not throw, and execute() drops such an operation.
  Recovery(Records& records, const FindMemory& find, bool lenient);

  // Completes or drops all operations in progress, and sets `applied` of their sessions. An
  // operation that is dropped, or whose segments are gone, is logged, and its request ends with
  // kInternal.
  void execute();

 private:
  struct Begun {
    Recorded recorded;
    SessionRecord* session;  // null: the session has ended
    BoundOperation operation;
    const char* dropped = nullptr;  // the reason to drop it, or null
    bool done = false;              // executed: only the record has to be freed
  };
  Begun inspect(const Recorded& recorded, const FindMemory& find) const;
  void drop(const Begun& one);

  Records& records_;
  std::vector<Begun> begun_;
};

}  // namespace hbm::box::server::storage
