// Which of a session's sequenced requests are new, and what the others were answered.
//
// Numbers rise by one. The one after the last that was carried out is new; those that were carried
// out, and whose replies the client has not confirmed, are answered again as they were. A client
// may leave smb::kWindow replies unconfirmed, so the window is bounded.
//
// Threads: applied() may be called from any; all else by one at a time, the session's strand.
#pragma once

#include <cstdint>
#include <deque>

#include "box/protocol/protocol.h"
#include "box/server/request_handler.h"
#include "box/server/storage/operation_record.h"

namespace hbm::box {

class ReplyWindow {
 public:
  // What `record` has as carried out already, a box did that has been restarted since.
  explicit ReplyWindow(const SessionRecord& record) : record_(record), restored_(record.applied) {}

  enum class Turn {
    kNew,      // carry it out, then save()
    kSaved,    // saved() is the reply
    kForeign,  // carried out before the restart: the record alone knows how it ended
  };
  // Forgets the replies that `sequence` confirms.
  // Throws Refusal(kMalformed) for a number that breaks the rules.
  Turn turn(const smb::Sequence& sequence);

  const Reply& saved(uint64_t number) const;

  // Keeps the reply of the last number, applied(). What it grants is not kept, so that a window
  // holds no memory of a segment.
  void save(Reply reply);

  uint64_t applied() const noexcept { return record_.applied.load(std::memory_order_acquire); }
  // The last number before the box was restarted; 0: it was not.
  uint64_t restored() const noexcept { return restored_; }

 private:
  const SessionRecord& record_;
  const uint64_t restored_;
  uint64_t answered_ = 0;
  std::deque<Reply> replies_;  // of the numbers up to applied()
};

}  // namespace hbm::box
