// One operation of a client, from its issue until it is answered.
//
// Threads: what is set before the issue does not change. `issued` may be read at any time. `stage`
// and all below it are guarded by the core's mutex. `work` is the driver's while the stage is
// kPosted. The outcome is written once, before settle(), and may be read once settled() is true.
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

#include "box/client/attachment.h"
#include "box/client/error.h"
#include "box/client/stats.h"
#include "box/protocol/protocol.h"
#include "box/transport/transport.h"

namespace hbm::client {

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
    kPosted,    // the link has it
    kFinished,  // nothing uses its memory any more
  };

  explicit ClientOperation(smb::Opcode opcode) : verb(smb::opcode_name(opcode)) {
    work.opcode = opcode;
  }
  ClientOperation(const ClientOperation&) = delete;
  ClientOperation& operator=(const ClientOperation&) = delete;

  template <smb::Body T>
  void set_body(const T& body) {
    const auto bytes = std::as_bytes(std::span(&body, 1));
    work.body.assign(bytes.begin(), bytes.end());
  }

  smb::Opcode opcode() const noexcept { return work.opcode; }
  bool is_transfer() const noexcept {
    return opcode() == smb::Opcode::kRead || opcode() == smb::Opcode::kWrite;
  }
  bool is_sequenced() const noexcept { return smb::sequenced(opcode()); }

  // Of no bytes: there is nothing to do.
  bool is_empty() const noexcept {
    return (is_transfer() || opcode() == smb::Opcode::kAccumulate) &&
           touches[0].begin == touches[0].end;
  }

  // What was asked, for messages: "write of 4096 bytes at 0 of segment 00ff…".
  std::string text() const;

  bool settled() const noexcept { return settled_.load(std::memory_order_acquire) != 0; }
  void settle() noexcept;  // REQUIRES: the outcome is written
  void wait_settled(Clock::time_point until) const noexcept;

  std::atomic<bool> issued{false};  // the core has it, and will settle it

  transport::TransportRequest work;
  const char* verb;              // for text()
  std::string subject;           // likewise, where `touches` do not tell
  std::array<Touch, 2> touches;  // those with an attachment
  std::shared_ptr<const void> hold;
  Clock::time_point deadline = Clock::time_point::max();

  // The outcome.
  std::optional<Failure> failure;
  int64_t value = 0;                       // kFetchAdd
  std::shared_ptr<Attachment> attachment;  // kAlloc
  std::vector<std::byte> payload;          // kStats

  Stage stage = Stage::kBlocked;
  uint64_t number = 0;   // of a sequenced request that was posted; 0: none yet
  bool expired = false;  // its deadline has passed while the link had its memory
  unsigned blockers = 0;
  std::vector<ClientOperation*> behind_post;                    // wait until this one is posted
  std::vector<ClientOperation*> behind_finish;                  // wait until this one is finished
  std::list<std::shared_ptr<ClientOperation>>::iterator place;  // among the unfinished

 private:
  std::atomic<uint32_t> settled_{0};
};

}  // namespace hbm::client
