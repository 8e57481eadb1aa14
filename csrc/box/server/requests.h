// Executes the requests of clients: one function for each opcode, which checks the request against
// the client's rights, and does it.
//
// Threads: dispatch() may be called from any thread; for one session, only by the handler that has
// the session.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "box/protocol/protocol.h"
#include "box/server/accumulator.h"
#include "box/server/registry.h"
#include "box/server/request_handler.h"
#include "box/server/session.h"
#include "box/server/sessions.h"
#include "box/server/storage/records.h"
#include "box/server/storage/segment.h"

namespace hbm::box {

class Requests {
 public:
  // All of them outlive it. `totals` counts over all sessions.
  Requests(Registry& registry, Sessions& sessions, Records& records, Accumulator& accumulator,
           Counters& totals);

  // Executes a request, or replays the reply if it is a repeated one. Takes every opcode except
  // kJoin, kRead, kWrite and kStats. Never throws: an exception becomes a refusal, and is in the
  // log as well if no client is to blame. REQUIRES: `body` has the opcode's size.
  Reply dispatch(Session& session, smb::Opcode opcode, std::span<const std::byte> body) noexcept;

 private:
  // Throws what the request fails with. REQUIRES: the request is new, or not sequenced.
  Reply execute(Session& session, smb::Opcode opcode, std::span<const std::byte> body);

  // Returns the reply to a request that was executed before: the saved one, or one made from the
  // record that a box left which was restarted since.
  Reply replay(Session& session, smb::Opcode opcode, std::span<const std::byte> body,
               ReplyWindow::Turn turn);

  Reply alloc(Session& session, const smb::Alloc& request);
  Reply replay_alloc(Session& session, const smb::Alloc& request);
  Reply attach(Session& session, const smb::Attach& request);
  Reply free(Session& session, const smb::Release& request);
  Reply remove(Session& session, const smb::Release& request);
  Reply leave(Session& session);
  OpenedSegment open(const Session& session, const smb::Alloc& request);
  OpenedSegment created_before(const Session& session, const smb::Alloc& request);
  Reply grant(Session& session, uint32_t handle, uint32_t flags, OpenedSegment opened);

  Reply accumulate(Session& session, const smb::Accumulate& request);
  Reply fetch_add(Session& session, const smb::FetchAdd& request);

  Registry& registry_;
  Sessions& sessions_;
  Records& records_;
  Accumulator& accumulator_;
  Counters& totals_;
};

// Checks that segments' requests share. All throw Refusal.

// kNotAttached when there is none.
SessionAttachment attached(const Session& session, uint32_t handle);

// kReadOnly unless the client may write through it.
void require_write(const Session& session, const SessionAttachment& attachment);

// kRange when it does not lie inside the segment, at multiples of `unit`.
void require_range(const BoxSegment& segment, uint64_t offset, uint64_t bytes, uint64_t unit);

}  // namespace hbm::box
