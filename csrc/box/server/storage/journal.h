// The journal of a store: an append-only file that says which segments were created and deleted.
//
// Each record has its length and a checksum of its contents, so one that is torn, because the
// server or the host stopped while it was being written, or damaged is detected: it is dropped,
// with all that follows it where not even its length can be believed, and the log says so.
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "box/protocol/protocol.h"
#include "box/server/storage/segment.h"

namespace hbm::box {

struct Creation {
  smb::Id key;
  uint64_t size = 0;  // bytes
  bool temporary = false;
  Creator creator;
};

struct JournalEntry {
  uint64_t serial = 0;
  Creation creation;
};

class Journal {
 public:
  struct Contents {
    std::vector<JournalEntry> live;  // created and not deleted, in the order of creation
    bool damaged = false;            // something was dropped
  };

  // Reads the file; returns nothing if it is not there. Throws Error(kUnavailable) when it cannot
  // be read.
  static Contents read(const std::string& path);

  // A new journal of those segments, put in the place of the old one at once or not at all. With
  // `sync`, the disk has each record before the call that wrote it returns.
  // Throws Error(kUnavailable) when the kernel or the disk refuses.
  Journal(const std::string& path, bool sync, const std::vector<JournalEntry>& live);

  // Throw Error(kUnavailable) when the disk refuses; nothing has been recorded then.
  void created(const JournalEntry& entry);
  void deleted(uint64_t serial);

  uint64_t records() const noexcept { return records_; }  // in the file

 private:
  void append(std::span<const std::byte> record);

  const std::string path_;
  const bool sync_;
  bool named_;  // the disk knows the file by its name, not an old one that says the same
  Descriptor file_;
  uint64_t size_ = 0;  // bytes
  uint64_t records_ = 0;
};

}  // namespace hbm::box
