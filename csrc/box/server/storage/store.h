// The store of a box: its segments live in the memory of a pool alone, or in a directory besides,
// from which a box that is started again has them back.
//
// The directory holds
//   lock         held (flock) by the server that uses the store
//   identity     the format's version, and the Id of the contents
//   state        how the last server left it (store_state.h)
//   journal      the catalogue: which segments there are (catalogue.h)
//   segments/    a file for each, <key>.<serial> in hexadecimal: the segment's memory, then its
//                label (segment_label.h)
//   sessions     the sessions, with how their last requests ended (records.h)
//   operations   the operations in progress, so that each is carried out exactly once
//   checksums    after an orderly end: of journal, segments, sessions and operations (digest.h)
//   lost/        files that the catalogue did not know of, after a crash of the host
//
// A server that is killed loses nothing. A crash of the host may lose anything that the kernel had
// not written, unless `sync` is set: then the keys, and every accumulate and fetch_add, are on the
// disk before their reply; writes of clients are not.
//
// A store that no server, and no crash, can have left as it is found is refused, and nothing in it
// is changed. docs/memory-box.md lists the states that are valid.
//
// Threads: open() first; then every member may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "box/server/storage/catalogue.h"
#include "box/server/storage/directory.h"
#include "box/server/storage/records.h"
#include "box/server/storage/recovery.h"
#include "box/server/storage/segment.h"
#include "box/server/storage/store_state.h"
#include "box/server/storage/tuning.h"
#include "memory/pool.h"

namespace hbm::box {

struct StoreOptions {
  std::string directory;  // made if it is not there; empty: none, all is lost with the process
  bool sync = false;
  RecordSizes records;
  // Records of segments that are gone, which the catalogue may have before it is written anew.
  uint64_t dead_records = kMostDeadRecords;
};

class Store {
 public:
  // Takes the directory, carries out what an earlier server had begun, and maps its segments, whose
  // data is read only to compare it with `checksums`.
  // Throws Error(kInvalid) when the directory is something else than a store, Error(kUnavailable)
  // when another server has it, it is damaged or of another version, or the kernel refuses, and
  // Error(kExhausted) when the pool cannot hold the segments or the disk is full.
  static std::unique_ptr<Store> open(const StoreOptions& options,
                                     std::shared_ptr<memory::Pool> pool);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  smb::Id contents() const noexcept { return contents_; }
  bool durable() const noexcept { return !options_.directory.empty(); }
  Records& records() noexcept { return *records_; }

  // The segments that open() found, with their creators; the sessions' attachments are not kept.
  std::vector<std::shared_ptr<BoxSegment>> take_found();

  // A new segment, full of zeros. REQUIRES: no segment has its key.
  // Throws Error(kExhausted) when the pool, the disk or the limit on open files cannot hold it,
  // Error(kUnavailable) when the kernel refuses.
  std::shared_ptr<BoxSegment> create(const Creation& creation);

  // The segment's key is gone, for good. Its memory, and its file, go with the last pointer to it.
  // Throws Error(kUnavailable) when the catalogue cannot be written; nothing has changed then.
  void remove(const BoxSegment& segment);

  // Ends the store in order: everything is on the disk, with its checksums, when it returns. If
  // that fails, the log says so, and the store is as after a kill.
  // REQUIRES: nobody uses the store, its records or its segments any more, but for processes that
  // have a segment mapped; such a segment gets no checksum.
  void close() noexcept;

 private:
  Store(const StoreOptions& options, std::shared_ptr<memory::Pool> pool);
  using Files = std::map<uint64_t, std::string>;  // by serial

  void load();
  void make();
  void use_left(const StoreState& state);
  bool take_segment(const CatalogueEntry& entry, Files& files, bool lenient);
  FindMemory find_memory(const Files& others);
  void sort_others(const Files& others, const Catalogue::Contents& catalogue, bool lenient,
                   std::vector<std::string>& removed, std::vector<std::string>& kept) const;
  void say_what_is_known(bool closed, bool lenient, const std::set<std::string>& verified) const;
  void accept();
  void use_records(std::unique_ptr<Records> left);
  void use_catalogue(const Catalogue::Contents& left, const std::vector<CatalogueEntry>& live);
  std::vector<std::string> files_at_rest() const;
  RecordsPlace place() const;
  static std::shared_ptr<BoxSegment> segment(const Creation& creation,
                                             std::shared_ptr<memory::PoolBlock> block,
                                             std::shared_ptr<StoredSegment> stored);
  void require_room(uint64_t bytes) const;
  void compact() noexcept;

  const StoreOptions options_;
  const std::shared_ptr<memory::Pool> pool_;
  std::unique_ptr<Directory> directory_;  // none: all is in memory
  smb::Id contents_;
  std::unique_ptr<Records> records_;
  std::vector<std::shared_ptr<BoxSegment>> found_;
  std::atomic<uint64_t> next_serial_{1};

  std::mutex mutex_;  // guards all below
  std::unique_ptr<Catalogue> catalogue_;
  std::map<uint64_t, Creation> live_;  // by serial
  uint64_t compact_at_ = 0;            // records; not before, as it failed
};

}  // namespace hbm::box
