// The catalogue of a store: an append-only file that says which segments were created and deleted.
// The file is called `journal` and begins with HBMJOURN, as in every store of version 2.
//
// All records have one size, and each has a checksum of its contents and of all records before it.
// So a last record that is torn, because the box or the host stopped while it was being written, is
// told from damage: it is dropped, which the log says, and a catalogue that is damaged is refused.
//
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <set>
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

struct CatalogueEntry {
  uint64_t serial = 0;
  Creation creation;
};

class Catalogue {
 public:
  struct Contents {
    std::vector<CatalogueEntry> live;  // created and not deleted, in the order of creation
    std::set<uint64_t> deleted;        // serials
    bool torn = false;                 // the last record, or what the disk had of it, was dropped
    uint64_t records = 0;              // whole ones
    uint64_t check = 0;                // of the last whole one
  };

  // Reads the file of the store with those contents, and changes nothing.
  // Throws Error(kUnavailable) when it is missing, damaged, or another store's.
  static Contents read(const std::string& path, const smb::Id& contents);

  // A new catalogue of those segments, put in the place of the old one at once or not at all. It
  // also names serials of deleted segments, whose files may still be there. With `sync`, the disk
  // has each record before the call that wrote it returns. Throws Error(kExhausted) when the disk
  // is full, Error(kUnavailable) when the kernel refuses; the old catalogue is as it was then.
  Catalogue(const std::string& path, const smb::Id& contents, bool sync,
            const std::vector<CatalogueEntry>& live, const std::set<uint64_t>& deleted);

  // The catalogue that read() has read, to go on with after its last whole record.
  Catalogue(const std::string& path, bool sync, const Contents& left);

  // Throw Error(kUnavailable) when the disk refuses; nothing has been recorded then.
  void created(const CatalogueEntry& entry);
  void deleted(uint64_t serial);

  uint64_t records() const noexcept { return records_; }  // in the file

 private:
  void append(const CatalogueEntry& entry, bool deletion);

  const std::string path_;
  const bool sync_;
  bool named_;  // the disk knows the file by its name, not an old one that says the same
  Descriptor file_;
  uint64_t records_ = 0;
  uint64_t check_ = 0;  // of the last record
};

}  // namespace hbm::box
