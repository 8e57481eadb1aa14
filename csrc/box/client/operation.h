// One operation of a client, from its issue until it is answered, the segments that it touches, and
// the order of operations: which ones wait for which.
//
// Two operations conflict when they touch the same bytes of a segment and one of them changes
// these. The later one waits until the earlier one is finished; if both are sequenced, until it is
// posted, because the box carries sequenced requests out in the order in which they are posted.
//
// Threads: what is set before the issue does not change. `issued` may be read at any time. The lock
// of the request table guards `stage` and all below it, and the functions of the order. `request`
// is the driver's while the stage is kPosted. The outcome is written once, before settle(), and may
// be read once settled() is true.
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

namespace hbm::client {

class ClientOperation;

enum class AttachmentState { kLive, kFreed, kLost };

// A segment that a client has attached.
struct Attachment {
  const smb::Id key;
  const uint64_t size;
  const uint32_t handle;
  const bool created;
  const bool read_only;
  const bool temporary;

  // Guarded by the request table's lock.
  std::shared_ptr<transport::Grant> grant;  // of the connection that stands, or of the last one
  AttachmentState state = AttachmentState::kLive;
  std::string why{};  // it is lost

  // Those that touch the segment, in the order of issue; shared by all attachments to one key.
  std::shared_ptr<std::vector<ClientOperation*>> unfinished{};
};

std::string key_text(smb::Id key);  // 32 hexadecimal digits

using Clock = std::chrono::steady_clock;

// Bytes of a segment that an operation reads or changes.
struct Touch {
  std::shared_ptr<Attachment> attachment;
  uint64_t begin = 0;
  uint64_t end = 0;
  bool changes = false;
};

class ClientOperation {
 public:
  enum class Stage {
    kBlocked,   // behind an earlier operation
    kReady,     // to be posted, or copied
    kPosted,    // the transport has it
    kFinished,  // nothing uses its memory any more
  };

  explicit ClientOperation(smb::Opcode opcode) : verb(smb::opcode_name(opcode)) {
    request.opcode = opcode;
  }
  ClientOperation(const ClientOperation&) = delete;
  ClientOperation& operator=(const ClientOperation&) = delete;

  template <smb::Body T>
  void set_body(const T& body) {
    const auto bytes = std::as_bytes(std::span(&body, 1));
    request.body.assign(bytes.begin(), bytes.end());
  }

  smb::Opcode opcode() const noexcept { return request.opcode; }
  bool is_transfer() const noexcept {
    return opcode() == smb::Opcode::kRead || opcode() == smb::Opcode::kWrite;
  }
  bool is_sequenced() const noexcept { return smb::sequenced(opcode()); }

  // True if it touches no bytes: there is nothing to do.
  bool is_empty() const noexcept {
    return (is_transfer() || opcode() == smb::Opcode::kAccumulate) &&
           touches[0].begin == touches[0].end;
  }

  // The operation, for messages: "write of 4096 bytes at 0 of segment 00ff…".
  std::string text() const;

  bool settled() const noexcept { return settled_.load(std::memory_order_acquire) != 0; }
  void settle() noexcept;  // REQUIRES: the outcome is written
  void wait_settled(Clock::time_point until) const noexcept;

  std::atomic<bool> issued{false};  // the request table has it, and will settle it

  transport::TransportRequest request;
  const char* verb;              // for text()
  std::string subject;           // likewise, where `touches` do not tell
  std::array<Touch, 2> touches;  // those with an attachment
  std::shared_ptr<const void> hold;
  Clock::time_point deadline = Clock::time_point::max();

  // The outcome.
  std::optional<Failure> failure;
  int64_t value = 0;                       // kFetchAdd; kExists: 1 or 0
  std::shared_ptr<Attachment> attachment;  // kAlloc
  std::vector<std::byte> payload;          // kStats

  Stage stage = Stage::kBlocked;
  uint64_t number = 0;   // of a sequenced request that was posted; 0: none yet
  bool expired = false;  // its deadline has passed while the transport had its memory
  unsigned blockers = 0;
  std::vector<ClientOperation*> behind_post;                    // wait until this one is posted
  std::vector<ClientOperation*> behind_finish;                  // wait until this one is finished
  std::list<std::shared_ptr<ClientOperation>>::iterator place;  // among the unfinished

 private:
  std::atomic<uint32_t> settled_{0};
};

namespace order {

// Whether an unfinished operation stands in the way of one that touches this.
bool blocked(const Touch& touch);

// Puts an operation behind all that were added before; its stage says whether it is ready.
void add(ClientOperation& operation);

// The operation's stage is kPosted, kFinished from now on. Returns those that became ready.
std::vector<ClientOperation*> posted(ClientOperation& operation);
std::vector<ClientOperation*> finished(ClientOperation& operation);

}  // namespace order

}  // namespace hbm::client
