// Keeps the segments of a box, either in the memory of a pool only, or in a directory, from which a
// restarted box recovers them.
//
// The directory has
//   lock         held (flock) by the server that uses the store
//   identity     the version of the format, and the store generation
//   state        how the last server left the store (store_state.h)
//   journal      the catalogue of the segments (catalogue.h)
//   segments/    a file for each, <key>.<serial> in hexadecimal: the memory, then the footer
//                (segment_footer.h)
//   sessions     the sessions, with the outcomes of their last requests (records.h)
//   operations   the operations in progress, so that each is applied exactly once
//   checksums    after an orderly end: of journal, segments, sessions and operations (digest.h)
//   lost/        files that the catalogue did not have, after a crash of the host
//
// A killed server loses nothing. A crash of the host may lose data that the kernel had not written.
// With `sync`, all keys, accumulates and fetch_adds are on the disk before their reply; writes of
// clients are not.
//
// open() refuses a store in a state that only damage explains, and leaves the store unchanged.
// docs/memory-box.md lists the valid states.
//
// Threads: any, after open().
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

namespace hbm::box::server::storage {

struct StoreOptions {
  std::string directory;  // created if missing; empty: no store, all data end with the process
  bool sync = false;
  RecordSizes records;
  // The number by which records of deleted segments may exceed the live segments before the
  // catalogue is compacted.
  uint64_t dead_records = kMostDeadRecords;
};

class Store {
 public:
  // Locks the directory, completes the operations that an earlier server had in progress, and maps
  // the segments. Reads all data of the segments only to verify `checksums`.
  //
  // Throws Error(kInvalid) if the directory is no store; Error(kUnavailable) if another server uses
  // it, it is damaged or of another version, or the kernel fails; Error(kExhausted) if the pool
  // cannot hold the segments or the disk is full.
  static std::unique_ptr<Store> open(const StoreOptions& options,
                                     std::shared_ptr<memory::Pool> pool);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  protocol::Id generation() const noexcept { return generation_; }
  bool durable() const noexcept { return !options_.directory.empty(); }
  Records& records() noexcept { return *records_; }

  // Returns the segments that open() found, with their creators and without attachments, and
  // forgets them.
  std::vector<std::shared_ptr<BoxSegment>> take_found();

  // Creates a zero-filled segment. REQUIRES: no segment has its key. Throws Error(kExhausted) if
  // the pool, the disk or the limit on open files does not suffice, Error(kUnavailable) if the
  // kernel fails.
  std::shared_ptr<BoxSegment> create(const Creation& creation);

  // Deletes the key of the segment now, and its memory and file with the last pointer to the
  // segment. Throws Error(kUnavailable) if the catalogue cannot be written; nothing has changed
  // then.
  void remove(const BoxSegment& segment);

  // Closes the store in order: all data and checksums are on the disk when it returns. If that
  // fails, logs it, and leaves the store as after a kill. REQUIRES: no thread uses the store, its
  // records or its segments. A segment that another process may have mapped for writing gets no
  // checksum.
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
  void log_unverified_segments(bool closed, bool lenient,
                               const std::set<std::string>& verified) const;
  void accept();
  void use_records(std::unique_ptr<Records> left);
  void use_catalogue(const Catalogue::Contents& left, const std::vector<CatalogueEntry>& live);
  std::vector<std::string> files_at_rest() const;
  RecordsLocation location() const;
  static std::shared_ptr<BoxSegment> segment(const Creation& creation,
                                             std::shared_ptr<memory::PoolBlock> block,
                                             std::shared_ptr<StoredSegment> stored);
  void require_room(uint64_t bytes) const;
  void compact() noexcept;

  const StoreOptions options_;
  const std::shared_ptr<memory::Pool> pool_;
  std::unique_ptr<Directory> directory_;  // none: in memory only
  protocol::Id generation_;
  std::unique_ptr<Records> records_;
  std::vector<std::shared_ptr<BoxSegment>> found_;
  std::atomic<uint64_t> next_serial_{1};

  std::mutex mutex_;  // guards all below
  std::unique_ptr<Catalogue> catalogue_;
  std::map<uint64_t, Creation> live_;  // by serial
  uint64_t compact_at_ = 0;  // after a failed attempt: the number of records at which to try again
};

}  // namespace hbm::box::server::storage
