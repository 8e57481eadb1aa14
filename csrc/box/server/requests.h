// Carries out the requests of clients: one function an opcode, which checks what was asked against
// what the client may do, and does it.
//
// Threads: carry_out() may be called from any thread, for one session by the handler
// that has it alone.
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

  // Every opcode but kJoin, kRead, kWrite and kStats. Never throws: what fails is refused, and what
  // no client is to blame for is in the log as well. REQUIRES: `body` has the opcode's size.
  Reply carry_out(Session& session, smb::Opcode opcode, std::span<const std::byte> body) noexcept;

 private:
  Reply carry_out_unsequenced(Session& session, smb::Opcode opcode,
                              std::span<const std::byte> body);
  Reply carry_out_sequenced(Session& session, smb::Opcode opcode, std::span<const std::byte> body);
  Reply carry_out_new(Session& session, smb::Opcode opcode, std::span<const std::byte> body);
  // Carried out before: the reply that was saved, or one made from the record of a box that was
  // restarted since.
  static Reply answer_again(const Session& session, smb::Opcode opcode,
                            std::span<const std::byte> body);
  Reply answer_from_record(Session& session, smb::Opcode opcode, std::span<const std::byte> body);

  // In requests_segments.cpp.
  Reply alloc(Session& session, const smb::Alloc& request);
  Reply alloc_again(Session& session, const smb::Alloc& request);
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
