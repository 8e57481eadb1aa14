// A client of one memory box: allocates segments by key, and reads, writes and sums in them.
//
// Order: if two operations of a client touch the same bytes of a segment and one of them changes
// these bytes, they take effect in the order of issue. All others may overlap in time.
//
// Lost connections: the client reconnects by itself for `reconnect_timeout`. It then repeats reads
// and writes. It sends unanswered accumulates, fetch_adds, allocs, frees and removes again under
// their old numbers, so the box applies each exactly once. If the box returns without its data,
// operations on its segments fail with BoxError kLost. If it does not return in time, every
// operation fails with kUnreachable from then on.
//
// Threads: any, for every member of every class here. A synchronous operation on an idle client
// runs in the caller. A thread of the client progresses all other operations, keeps the lease and
// reconnects. A process forked from the client's cannot use the client: every call throws.
//
// Errors: an invalid argument throws Error(kInvalid) before anything is sent; box/client/error.h
// has the others. Future::get() throws the error of an asynchronous operation.
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

namespace hbm::box::client {

struct Core;
class ClientOperation;
struct Attachment;
struct Touch;

// An attachment to a segment; copies share it. It ends with Client::free or with the client.
class Segment {
 public:
  protocol::Id key() const noexcept;
  uint64_t size() const noexcept;  // bytes
  bool created() const noexcept;   // created by this attachment, zero-filled
  bool read_only() const noexcept;

  // Returns the memory of the segment on shm, valid while the pointer is held. Throws
  // Error(kUnsupported) on other transports, and as every operation for a freed or lost segment.
  std::shared_ptr<std::byte> memory() const;

 private:
  friend class Batch;
  friend class Client;
  Segment(std::shared_ptr<Core> core, std::shared_ptr<Attachment> attachment);

  // Throws Error(kInvalid) if the segment belongs to another client.
  const std::shared_ptr<Attachment>& attachment_in(const std::shared_ptr<Core>& core) const;

  std::shared_ptr<Core> core_;
  std::shared_ptr<Attachment> attachment_;
};

// The result of an operation. wait() and get() throw Error(kInvalid) before it is issued.
class Future {
 public:
  bool done() const noexcept;

  // Waits until the operation is done or `most` has passed. Returns true if it is done.
  bool wait(std::chrono::nanoseconds most) const;

  // Waits, and throws the error of the operation if it failed. Returns the value of a fetch_add,
  // else 0.
  int64_t get() const;

 private:
  friend class Batch;
  friend class Client;
  Future(std::shared_ptr<Core> core, std::shared_ptr<ClientOperation> operation);

  std::shared_ptr<Core> core_;
  std::shared_ptr<ClientOperation> operation_;
};

// Operations that are issued together, so that their short frames share packets.
//
// The caller must keep `local` alive, and the data of a write unchanged, until the operation no
// longer uses it. `hold`, if given, is kept until then.
class Batch {
 public:
  ~Batch();  // unissued operations fail
  Batch(Batch&&) = default;
  Batch& operator=(Batch&&) = delete;

  Future read(const Segment& segment, uint64_t offset, std::byte* local, uint64_t bytes,
              std::shared_ptr<const void> hold = nullptr);
  Future write(const Segment& segment, uint64_t offset, const std::byte* local, uint64_t bytes,
               std::shared_ptr<const void> hold = nullptr);
  Future accumulate(const Segment& target, const Segment& source, const Accumulation& what);
  Future fetch_add(const Segment& segment, uint64_t offset, int64_t addend);

  // Issues the operations collected since the last issue, in that order, without waiting. If the
  // client is closed or a segment was freed, throws: none is issued, and all of them fail.
  void issue();

  // As issue(), for a caller that waits for the futures next, and so can progress them itself.
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
  protocol::StatsTotals totals{};
  std::vector<protocol::ClientStats> clients;
  std::vector<protocol::SegmentStats> segments;
};

class Client {
 public:
  // Connects. Throws BoxError, with the reason for each transport that was tried.
  explicit Client(const ClientOptions& options);
  ~Client();  // as close(), without waiting for unfinished operations
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  protocol::TransportKind transport() const;
  std::string why_transport() const;  // why this one was chosen, and not those before it

  Segment alloc(const AllocOptions& options);

  // Returns true if a segment has the key, without attaching to it. Ordered as a fetch_add:
  // reflects every alloc and remove that had returned.
  bool exists(protocol::Id key);

  // Read and write copy in the caller if possible: on shm, with a live connection and no
  // conflicting unfinished operation. `hold`: as in Batch; required if `while_waiting` may throw.
  void read(const Segment& segment, uint64_t offset, std::byte* local, uint64_t bytes,
            const std::shared_ptr<const void>& hold = nullptr);
  void write(const Segment& segment, uint64_t offset, const std::byte* local, uint64_t bytes,
             const std::shared_ptr<const void>& hold = nullptr);
  void accumulate(const Segment& target, const Segment& source, const Accumulation& what);
  int64_t fetch_add(const Segment& segment, uint64_t offset, int64_t addend);

  // Ends the attachment, after all operations issued on it. Does nothing for a freed or lost
  // segment.
  void free(const Segment& segment);

  // Deletes the key: no client can attach any more. Attachments, including this one, stay.
  void remove(const Segment& segment);

  // Registers memory until the pointer is destroyed: transfers from and to it need no copy on
  // verbs. The memory must stay mapped until then.
  std::shared_ptr<void> register_memory(std::byte* memory, uint64_t bytes);

  Batch batch();
  void ping();
  Stats stats();

  // Waits up to `patience` for unfinished operations while the connection is up, ends the session,
  // and fails the rest. Does nothing when called again. An exception of `while_waiting` ends the
  // waiting, and is rethrown once the client is closed.
  void close(std::chrono::milliseconds patience = std::chrono::seconds(5));
  bool closed() const;

 private:
  // Issues the operation and waits for it. Returns its value, or throws its failure.
  int64_t execute(const std::shared_ptr<ClientOperation>& operation);
  void transfer(protocol::Opcode opcode, Touch touch, std::byte* local,
                const std::shared_ptr<const void>& hold);

  std::shared_ptr<Core> core_;
};

}  // namespace hbm::box::client
