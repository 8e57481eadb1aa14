// The records of sessions and of operations in progress (operation_record.h): in plain memory, or
// in two mapped files of a store, `sessions` and `operations`.
//
// Without files there is no recovery, so operations leave no record.
//
// Errors: with `sync` the disk may fail. From then on begin() and finish() throw
// Error(kUnavailable), and the files stay unchanged, so that the next server can recover.
//
// Threads: any, but one at a time for one session.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "box/server/storage/files.h"
#include "box/server/storage/operation_record.h"
#include "box/server/storage/tuning.h"

namespace hbm::box::server::storage {

struct RecordSizes {
  uint32_t sessions = 4096;                // the most sessions
  uint32_t operations = 8;                 // the most in progress, one for each handler thread
  uint32_t parts = 8;                      // the most parts of one operation
  uint32_t chunk = kAccumulateChunkBytes;  // bytes

  friend bool operator==(const RecordSizes&, const RecordSizes&) = default;
};

// The record of an operation in progress; all null without files.
struct Recorded {
  OperationRecord* operation = nullptr;
  PartProgress* parts = nullptr;
  std::byte* undo = nullptr;  // one chunk for each part

  explicit operator bool() const noexcept { return parts != nullptr; }
};

// The location of the files.
struct RecordsLocation {
  std::string directory;
  protocol::Id generation;  // of the store
  bool sync = false;

  std::string sessions() const { return directory + "/sessions"; }
  std::string operations() const { return directory + "/operations"; }
};

class Records {
 public:
  static std::unique_ptr<Records> in_memory(const RecordSizes& sizes);

  // Creates new files with the sessions of `kept` (none if it is null), and replaces existing
  // files. With `sync`, the changes of open_session(), begin() and finish() are on the disk when
  // these functions return. Throws Error(kExhausted) if the disk is full; the old files are
  // unchanged then. Throws Error(kUnavailable) if the kernel fails. REQUIRES: `kept` has no
  // operation in progress.
  static std::unique_ptr<Records> create(const RecordsLocation& location, const RecordSizes& sizes,
                                         const Records* kept);

  // Opens the files of an earlier process, with their sizes; changes nothing in them. Throws
  // Error(kUnavailable) if a file is missing or its head is damaged.
  static std::unique_ptr<Records> open_existing(const RecordsLocation& location);

  // Throws Error(kUnavailable) if no box can have left a record as it is.
  void require_sound() const;

  // Frees the records that no box can have left as they are, and logs them.
  void drop_unsound();

  const RecordSizes& sizes() const noexcept { return sizes_; }
  bool sync() const noexcept { return location_.sync; }
  bool failed() const noexcept { return failed_; }
  const RecordsLocation& location() const noexcept { return location_; }

  // Returns a record for a new session. Throws Error(kExhausted) if all are in use,
  // Error(kUnavailable) if the disk fails.
  SessionRecord& open_session(const protocol::Id& id);

  // Frees the record. REQUIRES: no other thread executes a request of the session.
  void release_session(SessionRecord& session);

  // Returns the records in use: after a restart, the sessions that may be resumed.
  std::vector<SessionRecord*> sessions() const;

  // Records that request outcome.number was executed, or has failed for good. REQUIRES:
  // outcome.number == session.applied + 1.
  void finish(SessionRecord& session, const RequestOutcome& outcome);

  // Records that an operation begins, with no progress. Without files, all pointers in the result
  // are null. Waits while all operation records are in use. release() frees the record. REQUIRES:
  // operation.parts <= sizes().parts.
  Recorded begin(const SessionRecord& session, const BoxOperation& operation);
  void release(const Recorded& recorded);

  // Returns the operations that a killed process had in progress.
  std::vector<Recorded> begun() const;

  // Ends recording, because the disk has failed.
  void mark_failed();

  // Returns the session of a recorded operation, or null if the session has ended.
  SessionRecord* session_of(const OperationRecord& operation) const;

 private:
  Records(const RecordSizes& sizes, RecordsLocation location, MappedRegion sessions,
          MappedRegion operations);
  SessionRecord& session(uint32_t index) const;
  Recorded recorded(uint32_t index) const;
  void require_disk() const;
  SessionRecord& take_session();
  // With `sync`, returns when the bytes are on the disk. REQUIRES: mutex_ is not held.
  void save(const void* at, uint64_t bytes);

  const RecordSizes sizes_;
  const RecordsLocation location_;  // empty without files
  const MappedRegion sessions_;
  const MappedRegion operations_;  // no region without files
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // guards the free lists
  std::condition_variable operation_freed_;
  std::vector<uint32_t> free_sessions_;
  std::vector<uint32_t> free_operations_;
};

}  // namespace hbm::box::server::storage
