// The records of sessions and of operations in progress (operation_record.h): in plain memory, or
// in two mapped files of a store, `sessions` and `operations`.
//
// Without files there is nothing to recover from, so operations leave no record at all.
//
// Errors: with `sync` the disk may fail. From then on begin() and finish() throw
// Error(kUnavailable): what is on the disk stays as it is, for the next server to carry on from.
//
// Threads: every member may be called from any thread, but for one session by one at a time.
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

namespace hbm::box {

struct RecordSizes {
  uint32_t sessions = 4096;  // most at a time
  uint32_t operations = 8;   // most at a time: the box's handler threads
  uint32_t lanes = 8;        // most of an operation
  uint32_t chunk = kAccumulateChunkBytes;

  friend bool operator==(const RecordSizes&, const RecordSizes&) = default;
};

// An operation in progress, as it is recorded; all null without files.
struct Recorded {
  OperationRecord* operation = nullptr;
  LaneProgress* lanes = nullptr;
  std::byte* undo = nullptr;  // a chunk for each lane

  explicit operator bool() const noexcept { return lanes != nullptr; }
};

// Where the files are.
struct RecordsPlace {
  std::string directory;
  smb::Id contents;  // of the store
  bool sync = false;

  std::string sessions() const { return directory + "/sessions"; }
  std::string operations() const { return directory + "/operations"; }
};

class Records {
 public:
  static std::unique_ptr<Records> in_memory(const RecordSizes& sizes);

  // New files in `directory`, in the place of those that were there, with the sessions of `kept`
  // (which may be null). With `sync`, the disk has a change before the call that made it returns.
  // Throws Error(kExhausted) when the disk is full, Error(kUnavailable) when the kernel refuses;
  // the old files are still there then.
  static std::unique_ptr<Records> create(const RecordsPlace& place, const RecordSizes& sizes,
                                         const Records* kept);

  // The files that an earlier process left, with their sizes; changes nothing in them.
  // Throws Error(kUnavailable) when one of them is missing or its head is damaged.
  static std::unique_ptr<Records> left_in(const RecordsPlace& place);

  // Throws Error(kUnavailable) when a record is not as any instruction could have left it.
  void require_sound() const;

  // Frees such records, and says so in the log.
  void drop_unsound();

  const RecordSizes& sizes() const noexcept { return sizes_; }
  bool sync() const noexcept { return place_.sync; }
  bool failed() const noexcept { return failed_; }
  const RecordsPlace& place() const noexcept { return place_; }

  // A record for a new session. Throws Error(kExhausted) when all are in use, Error(kUnavailable)
  // when the disk fails.
  SessionRecord& open_session(const smb::Id& id);

  // REQUIRES: none of the session's requests is being carried out.
  void release_session(SessionRecord& session);

  // The records in use; after a restart, those of sessions that may come back.
  std::vector<SessionRecord*> sessions() const;

  // Request outcome.number has been carried out, or has failed for good.
  // REQUIRES: outcome.number == session.applied + 1.
  void finish(SessionRecord& session, const RequestOutcome& outcome);

  // Records that an operation begins, all lanes at 0; null without files. Waits while as many as
  // there is room for are in progress. release() ends it.
  // REQUIRES: operation.lanes <= sizes().lanes.
  Recorded begin(const SessionRecord& session, const BoxOperation& operation);
  void release(const Recorded& recorded);

  // The operations that a killed process had in progress.
  std::vector<Recorded> begun() const;

  // Recording is over, for the disk has failed.
  void give_up();

  // The session of a recorded operation; null when it has ended since.
  SessionRecord* session_of(const OperationRecord& operation) const;

 private:
  Records(const RecordSizes& sizes, RecordsPlace place, MappedRegion sessions,
          MappedRegion operations);
  SessionRecord& session(uint32_t index) const;
  Recorded recorded(uint32_t index) const;
  void require_disk() const;
  SessionRecord& take_session();
  void save(const void* at, uint64_t bytes);  // under `sync`; REQUIRES: mutex_ is free

  const RecordSizes sizes_;
  const RecordsPlace place_;  // none in memory
  const MappedRegion sessions_;
  const MappedRegion operations_;  // none without files
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // guards what is free
  std::condition_variable operation_freed_;
  std::vector<uint32_t> free_sessions_;
  std::vector<uint32_t> free_operations_;
};

}  // namespace hbm::box
