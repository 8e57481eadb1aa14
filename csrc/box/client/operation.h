// A client's operations, from issue to reply, the segments that they touch, and the order in which
// they run.
//
// Two operations conflict if they touch the same bytes of a segment and one of them changes these
// bytes. The later operation waits until the earlier one is finished. If both are sequenced, the
// later one waits only until the earlier one is posted, because the box executes sequenced requests
// in order.
//
// Threads: members set before the issue do not change. Any thread may read `issued`. The lock of
// the request table guards `stage`, the members below it, and the functions of `order`. The
// progress engine owns `request` while the stage is kPosted. The outcome is written once, before
// settle(), and may be read once settled() is true.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "box/client/error.h"
#include "box/protocol/protocol.h"
#include "box/transport/transport.h"

namespace hbm::box::client {

class ClientOperation;

enum class AttachmentState { kLive, kFreed, kLost };

// A segment that a client has attached.
struct Attachment {
  const protocol::Id key;
  const uint64_t size;
  const uint32_t handle;
  const bool created;
  const bool read_only;
  const bool temporary;

  // Guarded by the request table's lock.
  std::shared_ptr<transport::Grant> grant;  // of the current connection, or of the last one
  AttachmentState state = AttachmentState::kLive;
  std::string why{};  // the reason if it is lost

  // The unfinished operations that touch the segment, in the order of issue. All attachments to one
  // key share the list.
  std::shared_ptr<std::vector<ClientOperation*>> unfinished{};
};

std::string key_text(protocol::Id key);  // 32 hexadecimal digits

using Clock = std::chrono::steady_clock;

// The bytes of a segment that an operation reads or changes.
struct Touch {
  std::shared_ptr<Attachment> attachment;
  uint64_t begin = 0;
  uint64_t end = 0;
  bool changes = false;
};

class ClientOperation {
 public:
  enum class Stage {
    kBlocked,   // waits for an earlier operation
    kReady,     // can be posted or copied
    kPosted,    // posted on the transport
    kFinished,  // the memory is no longer used
  };

  explicit ClientOperation(protocol::Opcode opcode) : verb(protocol::opcode_name(opcode)) {
    request.opcode = opcode;
  }
  ClientOperation(const ClientOperation&) = delete;
  ClientOperation& operator=(const ClientOperation&) = delete;

  template <protocol::Body T>
  void set_body(const T& body) {
    const auto bytes = std::as_bytes(std::span(&body, 1));
    request.body.assign(bytes.begin(), bytes.end());
  }

  protocol::Opcode opcode() const noexcept { return request.opcode; }
  bool is_transfer() const noexcept {
    return opcode() == protocol::Opcode::kRead || opcode() == protocol::Opcode::kWrite;
  }
  bool is_sequenced() const noexcept { return protocol::sequenced(opcode()); }

  // Returns true if the operation touches no bytes, so there is nothing to do.
  bool is_empty() const noexcept {
    return (is_transfer() || opcode() == protocol::Opcode::kAccumulate) &&
           touches[0].begin == touches[0].end;
  }

  // Returns the operation as text: "write of 4096 bytes at 0 of segment 00ff…".
  std::string text() const;

  bool settled() const noexcept { return settled_.load(std::memory_order_acquire) != 0; }
  void settle() noexcept;  // REQUIRES: the outcome is written
  void wait_settled(Clock::time_point until) const noexcept;

  std::atomic<bool> issued{false};  // the request table has the operation, and will settle it

  transport::TransportRequest request;
  const char* verb;              // for text()
  std::string subject;           // for text(), if `touches` are not enough
  std::array<Touch, 2> touches;  // entries without an attachment are unused
  std::shared_ptr<const void> hold;
  Clock::time_point deadline = Clock::time_point::max();

  // The outcome.
  std::optional<Failure> failure;
  int64_t value = 0;                       // kFetchAdd: value before the addition; kExists: 1 or 0
  std::shared_ptr<Attachment> attachment;  // kAlloc
  std::vector<std::byte> payload;          // kStats

  Stage stage = Stage::kBlocked;
  uint64_t number = 0;   // sequence number once posted; 0: none yet
  bool expired = false;  // the deadline passed while the transport used the operation's memory
  unsigned blockers = 0;
  std::vector<ClientOperation*> behind_post;    // operations that wait until this one is posted
  std::vector<ClientOperation*> behind_finish;  // operations that wait until this one is finished
  std::list<std::shared_ptr<ClientOperation>>::iterator
      position;  // in the list of unfinished operations

 private:
  std::atomic<uint32_t> settled_{0};
};

namespace order {

// Returns true if `touch` conflicts with an unfinished operation.
bool blocked(const Touch& touch);

// Adds an operation. It waits for each unfinished earlier operation that conflicts with it: until
// that one is posted if both are sequenced, otherwise until it is finished. The stage becomes
// kBlocked if it must wait, otherwise kReady.
void add(ClientOperation& operation);

// Set the stage to kPosted or kFinished. Return the operations that became ready.
std::vector<ClientOperation*> posted(ClientOperation& operation);
std::vector<ClientOperation*> finished(ClientOperation& operation);

}  // namespace order

}  // namespace hbm::box::client
