// A client of one memory box: allocates segments by key, and reads, writes and sums in them.
//
// Order: if two operations of a client touch the same bytes of a segment and one of them changes
// these bytes, they take effect in the order of issue. All other operations may overlap in time.
//
// Lost connections: the client tries to reconnect for `reconnect_timeout`. Then it sends again all
// requests that have no reply. Accumulates, fetch_adds, allocs, frees and removes keep their
// sequence numbers, so the box applies each exactly once. If the session's lease ends before the
// client reconnects, such a request, except a free, fails with BoxError kUnreachable if the box may
// have executed it.
//
// If the box returns without its data, operations on its segments fail with kLost. If it does not
// return within `reconnect_timeout`, every operation fails with kUnreachable from then on.
//
// Threads: any, but one at a time for a Batch. One of the threads that wait for an operation
// progresses all operations of the client. While no thread waits, the client's own thread does so,
// and renews the lease. This thread also reconnects. In a forked child the client cannot be used:
// operations, waits, memory(), register_memory() and close() throw Error(kUnavailable).
//
// Errors: an invalid argument throws Error(kInvalid) before anything is sent; box/client/error.h
// has the other errors. Future::get() throws the error of an asynchronous operation.
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

// An attachment to a segment. Copies of a Segment share the attachment. Client::free or the end of
// the client ends it.
class Segment {
 public:
  protocol::Id key() const noexcept;
  uint64_t size() const noexcept;  // bytes
  bool created() const noexcept;   // true if this attachment created the segment, zero-filled
  bool read_only() const noexcept;

  // Returns the memory of the segment on shm, valid while the pointer is held. Throws
  // Error(kUnsupported) on other transports, Error(kInvalid) for a freed segment, BoxError kLost
  // for a lost one, and BoxError kClosed after close().
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
// The caller must keep `local` alive, and the data of a write unchanged, until Future::done()
// returns true. The client keeps `hold`, if given, at least until then.
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

  // Issues the operations collected since the last issue, in the order of their calls, without
  // waiting. If the client is closed or a segment was freed, throws and issues none of them; all of
  // them fail.
  void issue();

  // Like issue(), for a caller that waits for the futures next. The operations are sent during its
  // wait, and no other thread is woken to send them.
  void issue_and_wait_next();

 private:
  friend class Client;
  explicit Batch(std::shared_ptr<Core> core);
  Future keep(std::shared_ptr<ClientOperation> operation);
  void hand_over(bool waits);

  std::shared_ptr<Core> core_;
  std::vector<std::shared_ptr<ClientOperation>> collected_;
};

// A box's present clients and segments, and its counts of operations since its start.
struct Stats {
  protocol::StatsTotals totals{};
  std::vector<protocol::ClientStats> clients;
  std::vector<protocol::SegmentStats> segments;
};

class Client {
 public:
  // Connects. Throws Error(kInvalid) for invalid options, and BoxError kUnreachable, with the
  // reason, if the box cannot be reached. If the box refuses the client, throws the failure() of
  // the refusal's status (box/client/error.h), such as BoxError kDenied.
  explicit Client(const ClientOptions& options);
  ~Client();  // as close(), without waiting for unfinished operations
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  protocol::TransportKind transport() const;
  // Returns why this transport was chosen, and why no preferred transport was.
  std::string why_transport() const;

  Segment alloc(const AllocOptions& options);

  // Returns true if a segment has the key, without attaching to it. Takes into account every alloc
  // and remove, of any client, that had returned before the call.
  bool exists(protocol::Id key);

  // On shm, read() and write() copy in the calling thread if the connection is live and no
  // unfinished operation conflicts. `hold`: as in Batch. It is required if `while_waiting` may
  // throw, because the operation may then still use `local` after the call.
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

  // Registers memory until the returned pointer is destroyed; the memory must stay mapped until
  // then. On verbs, transfers from and to registered memory need no copy.
  std::shared_ptr<void> register_memory(std::byte* memory, uint64_t bytes);

  Batch batch();
  void ping();
  Stats stats();

  // Waits up to `patience` for unfinished operations while the connection is up. Then ends the
  // session, and fails the operations that are still unfinished. Does nothing when called again. An
  // exception of `while_waiting` ends the waiting, and is rethrown once the client is closed.
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
