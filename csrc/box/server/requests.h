// Executes the requests of clients: one function for each opcode, which checks the rights of the
// client and executes the request.
//
// Threads: any thread may call dispatch(). For one session, only the handler that has the session
// may call it.
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

namespace hbm::box::server {

class Requests {
 public:
  // REQUIRES: all arguments outlive this object. `totals` counts over all sessions.
  Requests(Registry& registry, Sessions& sessions, storage::Records& records,
           Accumulator& accumulator, storage::Counters& totals);

  // Executes a request, or replays the reply to a repeated one. Accepts every opcode except kJoin,
  // kRead, kWrite and kStats. Never throws: an exception becomes a refusal, and an error that is
  // not the client's is logged too. REQUIRES: `body` has the size for its opcode.
  Reply dispatch(Session& session, protocol::Opcode opcode,
                 std::span<const std::byte> body) noexcept;

 private:
  // Throws the failure of the request. REQUIRES: the request is new, or not sequenced.
  Reply execute(Session& session, protocol::Opcode opcode, std::span<const std::byte> body);

  // Returns the reply to an executed request: the saved reply or, if the box has restarted since, a
  // reply built from the session's record.
  Reply replay(Session& session, protocol::Opcode opcode, std::span<const std::byte> body,
               DuplicateRequestCache::Kind kind);

  Reply alloc(Session& session, const protocol::Alloc& request);
  Reply replay_alloc(Session& session, const protocol::Alloc& request);
  Reply attach(Session& session, const protocol::Attach& request);
  Reply free(Session& session, const protocol::Release& request);
  Reply remove(Session& session, const protocol::Release& request);
  Reply leave(Session& session);
  OpenedSegment open(const Session& session, const protocol::Alloc& request);
  OpenedSegment created_before(const Session& session, const protocol::Alloc& request);
  Reply grant(Session& session, uint32_t handle, uint32_t flags, OpenedSegment opened);

  Reply accumulate(Session& session, const protocol::Accumulate& request);
  Reply fetch_add(Session& session, const protocol::FetchAdd& request);

  Registry& registry_;
  Sessions& sessions_;
  storage::Records& records_;
  Accumulator& accumulator_;
  storage::Counters& totals_;
};

// The checks that several kinds of requests have in common. All throw Refusal.

// Throws kNotAttached if the handle has no attachment.
SessionAttachment attached(const Session& session, uint32_t handle);

// Throws kReadOnly unless the client may write through the attachment.
void require_write(const Session& session, const SessionAttachment& attachment);

// Throws kRange unless the range is inside the segment, at multiples of `unit`.
void require_range(const storage::BoxSegment& segment, uint64_t offset, uint64_t bytes,
                   uint64_t unit);

}  // namespace hbm::box::server
