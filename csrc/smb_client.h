// A client of one memory box: segments allocated by key, and reads, writes and sums in them.
//
// Order: one client's operations take effect in the order of issue wherever two of them touch the
// same bytes of a segment and one of them changes these; all others may overlap in time.
//
// Lost connections: the client connects again, by itself, for `reconnect_timeout`. Then reads and
// writes are repeated, and an accumulate, fetch_add, alloc, free or remove that had not been
// answered is sent again under its old number, so that the box applies it exactly once. When the
// box comes back without its data, every operation on its segments fails with BoxError kLost; when
// it does not come back in time, every operation fails with kUnreachable, for good.
//
// Threads: every member of every class here may be called from any thread. A synchronous operation
// on an idle client runs in the caller; a thread of the client's own drives all else, keeps the
// lease and reconnects. A process forked from the client's cannot use it: every call throws.
//
// Errors: bad arguments throw Error(kInvalid) before anything is sent; box/client/error.h has the
// rest. An asynchronous operation throws from Future::get() what came after the checks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "box/client/error.h"
#include "box/client/options.h"
#include "box/protocol/protocol.h"

namespace hbm::client {

struct Core;
class ClientOperation;
struct Attachment;
struct Touch;

// An attachment to a segment; copies are the same one. It ends by Client::free or with the client.
class Segment {
 public:
  smb::Id key() const noexcept;
  uint64_t size() const noexcept;  // bytes
  bool created() const noexcept;   // by this attachment, and it was full of zeros
  bool read_only() const noexcept;

  // shm: the segment itself, for as long as someone holds it. Throws Error(kUnsupported) on other
  // transports, and as every operation does for a segment that was freed or lost.
  std::shared_ptr<std::byte> memory() const;

 private:
  friend class Batch;
  friend class Client;
  Segment(std::shared_ptr<Core> core, std::shared_ptr<Attachment> attachment);

  // Throws Error(kInvalid) if the segment is another client's.
  const std::shared_ptr<Attachment>& attachment_in(const std::shared_ptr<Core>& core) const;

  std::shared_ptr<Core> core_;
  std::shared_ptr<Attachment> attachment_;
};

// An operation that was issued, or will be: wait() and get() throw Error(kInvalid) before it is.
class Future {
 public:
  bool done() const noexcept;

  // Waits at most so long; true once it is done.
  bool wait(std::chrono::nanoseconds most) const;

  // Waits, and throws what the operation failed with. The value is fetch_add's, else 0.
  int64_t get() const;

 private:
  friend class Batch;
  friend class Client;
  Future(std::shared_ptr<Core> core, std::shared_ptr<ClientOperation> operation);

  std::shared_ptr<Core> core_;
  std::shared_ptr<ClientOperation> operation_;
};

// Operations that are issued together: their small frames travel together.
//
// `hold`, where there is one, is kept until the operation no longer uses `local`: the caller keeps
// that memory alive, and a write's unchanged, until then.
class Batch {
 public:
  ~Batch();  // what it did not issue fails
  Batch(Batch&&) = default;
  Batch& operator=(Batch&&) = delete;

  Future read(const Segment& segment, uint64_t offset, std::byte* local, uint64_t bytes,
              std::shared_ptr<const void> hold = nullptr);
  Future write(const Segment& segment, uint64_t offset, const std::byte* local, uint64_t bytes,
               std::shared_ptr<const void> hold = nullptr);
  Future accumulate(const Segment& target, const Segment& source, const Accumulation& what);
  Future fetch_add(const Segment& segment, uint64_t offset, int64_t addend);

  // Issues what was collected since the last time, in that order, and does not wait for it.
  // Throws, with nothing issued, when the client is closed or one of the segments was freed; all of
  // them fail then.
  void issue();

  // The same for a caller that waits for the futures next, and so can drive them itself.
  void issue_and_wait_next();

 private:
  friend class Client;
  explicit Batch(std::shared_ptr<Core> core);
  Future keep(std::shared_ptr<ClientOperation> operation);
  void hand_over(bool waits);

  std::shared_ptr<Core> core_;
  std::vector<std::shared_ptr<ClientOperation>> collected_;
};

// Counts since a box's start, its clients and its segments.
struct Stats {
  smb::StatsTotals totals{};
  std::vector<smb::ClientStats> clients;
  std::vector<smb::SegmentStats> segments;
};

class Client {
 public:
  // Connects. Throws BoxError, with the reason for each transport that was tried.
  explicit Client(const ClientOptions& options);
  ~Client();  // as close(), without waiting for what is unfinished
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  smb::TransportKind transport() const;
  std::string why_transport() const;  // why this one, and why not the ones before it

  Segment alloc(const AllocOptions& options);

  // Returns true if a segment has the key; attaches to nothing. Ordered like a fetch_add: it sees
  // every alloc and remove that had returned.
  bool exists(smb::Id key);

  // A copy in the caller if that can be done now: shm, a live connection, and nothing unfinished in
  // its way. `hold`: as Batch's, needed if `while_waiting` may throw.
  void read(const Segment& segment, uint64_t offset, std::byte* local, uint64_t bytes,
            const std::shared_ptr<const void>& hold = nullptr);
  void write(const Segment& segment, uint64_t offset, const std::byte* local, uint64_t bytes,
             const std::shared_ptr<const void>& hold = nullptr);
  void accumulate(const Segment& target, const Segment& source, const Accumulation& what);
  int64_t fetch_add(const Segment& segment, uint64_t offset, int64_t addend);

  // Ends the attachment, once what was issued on it is done. Of a segment that was freed or lost:
  // does nothing.
  void free(const Segment& segment);

  // Takes the key away: nobody can attach any more. Attachments, this one too, stay.
  void remove(const Segment& segment);

  // Transfers from and to this memory go without a copy where the transport would need one (verbs),
  // until the pointer goes; the memory has to stay mapped as it is that long.
  std::shared_ptr<void> register_memory(std::byte* memory, uint64_t bytes);

  Batch batch();
  void ping();
  Stats stats();

  // Waits up to `patience` for what is unfinished while the connection stands, ends the session,
  // and fails what is left. Does nothing the second time. What `while_waiting` throws ends the
  // patience, and comes out once all is closed.
  void close(std::chrono::milliseconds patience = std::chrono::seconds(5));
  bool closed() const;

 private:
  // Issues the operation and waits for it. Returns its value, or throws its failure.
  int64_t execute(const std::shared_ptr<ClientOperation>& operation);
  void transfer(smb::Opcode opcode, Touch touch, std::byte* local,
                const std::shared_ptr<const void>& hold);

  std::shared_ptr<Core> core_;
};

}  // namespace hbm::client
