#include "box/server/requests.h"

#include <cstring>
#include <new>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "box/server/refusal.h"
#include "box/server/reply.h"

namespace hbm::box {
namespace {

template <smb::Body T>
T read(std::span<const std::byte> body) {
  T value;
  std::memcpy(&value, body.data(), sizeof value);
  return value;
}

// Runs `work`; what it throws becomes the reply.
template <class BoundOperation>
Reply answered(smb::Opcode opcode, BoundOperation&& work) noexcept {
  const auto failed = [opcode](const char* cause) {
    log::error(std::string("a client's ") + smb::opcode_name(opcode) + " failed: " + cause);
    return refused(smb::Status::kInternal, cause);
  };
  try {
    return work();
  } catch (const Refusal& refusal) {
    return refused(refusal.status(), refusal.what());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kExhausted) return failed(error.what());
    return refused(smb::Status::kExhausted, error.what());
  } catch (const std::bad_alloc&) {
    return refused(smb::Status::kExhausted, "the box's process is out of memory");
  } catch (const std::exception& error) {
    return failed(error.what());
  }
}

}  // namespace

Requests::Requests(Registry& registry, Sessions& sessions, Records& records,
                   Accumulator& accumulator, Counters& totals)
    : registry_(registry),
      sessions_(sessions),
      records_(records),
      accumulator_(accumulator),
      totals_(totals) {}

Reply Requests::carry_out(Session& session, smb::Opcode opcode,
                          std::span<const std::byte> body) noexcept {
  return answered(opcode, [&] {
    return smb::sequenced(opcode) ? carry_out_sequenced(session, opcode, body)
                                  : carry_out_unsequenced(session, opcode, body);
  });
}

Reply Requests::carry_out_unsequenced(Session& session, smb::Opcode opcode,
                                      std::span<const std::byte> body) {
  switch (opcode) {
    case smb::Opcode::kPing:
      return {};
    case smb::Opcode::kLeave:
      return leave(session);
    case smb::Opcode::kAttach:
      return attach(session, read<smb::Attach>(body));
    default:
      throw Refusal(smb::Status::kMalformed,
                    std::string(smb::opcode_name(opcode)) + " is no request to carry out");
  }
}

Reply Requests::carry_out_sequenced(Session& session, smb::Opcode opcode,
                                    std::span<const std::byte> body) {
  const auto sequence = read<smb::Sequence>(body);
  switch (session.window.turn(sequence)) {
    case ReplyWindow::Turn::kSaved:
      return answer_again(session, opcode, body);
    case ReplyWindow::Turn::kForeign:
      return answer_from_record(session, opcode, body);
    case ReplyWindow::Turn::kNew:
      break;
  }
  const Reply reply = answered(opcode, [&] { return carry_out_new(session, opcode, body); });
  if (session.window.applied() < sequence.number) {  // the accumulator finishes its own
    records_.finish(session.record, {.number = sequence.number, .status = reply.status});
  }
  session.window.save(reply);
  return reply;
}

Reply Requests::carry_out_new(Session& session, smb::Opcode opcode,
                              std::span<const std::byte> body) {
  switch (opcode) {
    case smb::Opcode::kAlloc:
      return alloc(session, read<smb::Alloc>(body));
    case smb::Opcode::kFree:
      return free(session, read<smb::Release>(body));
    case smb::Opcode::kDelete:
      return remove(session, read<smb::Release>(body));
    case smb::Opcode::kAccumulate:
      return accumulate(session, read<smb::Accumulate>(body));
    default:
      return fetch_add(session, read<smb::FetchAdd>(body));
  }
}

Reply Requests::answer_again(const Session& session, smb::Opcode opcode,
                             std::span<const std::byte> body) {
  Reply reply = session.window.saved(read<smb::Sequence>(body).number);
  if (opcode == smb::Opcode::kAlloc && reply.status == smb::Status::kOk) {
    const SessionAttachment attachment = attached(session, read<smb::Alloc>(body).handle);
    reply.granted = attachment.segment;
    reply.may_write = attachment.may_write;
  }
  return reply;
}

Reply Requests::answer_from_record(Session& session, smb::Opcode opcode,
                                   std::span<const std::byte> body) {
  const RequestOutcome* outcome = session.record.outcome(read<smb::Sequence>(body).number);
  if (outcome == nullptr) {
    throw Refusal(smb::Status::kMalformed, "how the request ended is known no more");
  }
  if (outcome->status != smb::Status::kOk) {
    throw Refusal(outcome->status, "it was refused so before the box was restarted");
  }
  if (opcode == smb::Opcode::kAlloc) return alloc_again(session, read<smb::Alloc>(body));
  if (opcode != smb::Opcode::kFetchAdd) return {};
  return with_body(smb::Fetched{outcome->value});
}

SessionAttachment attached(const Session& session, uint32_t handle) {
  SessionAttachment attachment = session.attachment(handle);
  if (attachment.segment == nullptr) {
    throw Refusal(smb::Status::kNotAttached,
                  "nothing is attached with the handle " + std::to_string(handle));
  }
  return attachment;
}

void require_write(const Session& session, const SessionAttachment& attachment) {
  if (session.identity().read_only) {
    throw Refusal(smb::Status::kReadOnly, "the client came in as a read-only one");
  }
  if (!attachment.may_write) {
    throw Refusal(smb::Status::kReadOnly, "the segment was attached for reading alone");
  }
}

void require_range(const BoxSegment& segment, uint64_t offset, uint64_t bytes, uint64_t unit) {
  const auto describe = [&] {
    return std::to_string(bytes) + " bytes at " + std::to_string(offset);
  };
  if (offset > segment.size || bytes > segment.size - offset) {
    throw Refusal(smb::Status::kRange,
                  describe() + " do not lie in a segment of " + std::to_string(segment.size));
  }
  if (offset % unit != 0 || bytes % unit != 0) {
    throw Refusal(smb::Status::kRange,
                  describe() + " are not in multiples of " + std::to_string(unit));
  }
}

}  // namespace hbm::box
