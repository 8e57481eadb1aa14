// The catalogue of a store: an append-only file of the segments that were created and deleted. The
// file is called `journal` and begins with HBMJOURN, as in every store of version 2.
//
// All records have one size. Each has a checksum of its data and of all records before it. If the
// box or its host stopped while a record was written, this last record is torn: the box drops it
// and logs that. A catalogue with any other wrong checksum is damaged, and the box refuses it.
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

namespace hbm::box::server::storage {

struct Creation {
  protocol::Id key;
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
    bool torn = false;                 // the last record was incomplete, and dropped
    uint64_t records = 0;              // number of complete records
    uint64_t check = 0;                // checksum of the last complete record
  };

  // Reads the catalogue of the store with this generation, and changes nothing. Throws
  // Error(kUnavailable) if it is missing, damaged, or of another store.
  static Contents read(const std::string& path, const protocol::Id& generation);

  // Writes a new catalogue of the segments `live`, and replaces the old one atomically. Also
  // records `deleted`, the serials of deleted segments whose files may still exist. With `sync`,
  // each record is on the disk before the call that wrote it returns. Throws Error(kExhausted) if
  // the disk is full, Error(kUnavailable) if the kernel fails; the old catalogue is unchanged then.
  Catalogue(const std::string& path, const protocol::Id& generation, bool sync,
            const std::vector<CatalogueEntry>& live, const std::set<uint64_t>& deleted);

  // Continues the catalogue that read() has returned, after its last complete record.
  Catalogue(const std::string& path, bool sync, const Contents& left);

  // Append a record. Throw Error(kUnavailable) if the disk fails; nothing is recorded then.
  void created(const CatalogueEntry& entry);
  void deleted(uint64_t serial);

  uint64_t records() const noexcept { return records_; }  // in the file

 private:
  void append(const CatalogueEntry& entry, bool deletion);

  const std::string path_;
  const bool sync_;
  // With `sync`: true once the file's name is on the disk. Before that, a crash of the host may
  // bring back the replaced catalogue, which has the same segments. Without `sync`: always true.
  bool named_;
  Descriptor file_;
  uint64_t records_ = 0;
  uint64_t check_ = 0;  // of the last record
};

}  // namespace hbm::box::server::storage
