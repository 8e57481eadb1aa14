#include "box/server/requests.h"

#include <new>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "base/log.h"
#include "box/server/request_handler.h"
#include "kernels/accumulate.h"

namespace hbm::box {
namespace {

// Runs `action`; what it throws becomes the reply.
template <class Action>
Reply answered(smb::Opcode opcode, Action&& action) noexcept {
  const auto failed = [opcode](const char* cause) {
    log::error(std::string("a client's ") + smb::opcode_name(opcode) + " failed: " + cause);
    return refused(smb::Status::kInternal, cause);
  };
  try {
    return action();
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

Formula formula_of(const smb::Accumulate& request) {
  if (request.dtype >= kDtypeCount || request.source_dtype >= kDtypeCount) {
    throw Refusal(smb::Status::kMalformed, "its type does not exist");
  }
  if (request.combine >= kCombineCount) {
    throw Refusal(smb::Status::kMalformed, "it neither adds nor assigns");
  }
  const Formula formula{.target = static_cast<Dtype>(request.dtype),
                        .source = static_cast<Dtype>(request.source_dtype),
                        .combine = static_cast<Combine>(request.combine),
                        .scale = request.scale};
  if (const char* cause = accumulate_unsupported(formula.target, formula.source)) {
    throw Refusal(smb::Status::kUnsupported, std::string("cannot accumulate ") +
                                                 dtype_name(formula.source) + " into " +
                                                 dtype_name(formula.target) + ": " + cause);
  }
  return formula;
}

void require_apart(const smb::Accumulate& request, const Formula& formula, const BoxSegment* target,
                   const BoxSegment* source) {
  const uint64_t to = request.target_offset, from = request.source_offset;
  if (target != source || (to == from && formula.target == formula.source)) return;
  if (to < from + formula.source_bytes(request.bytes) && from < to + request.bytes) {
    throw Refusal(
        smb::Status::kUnsupported,
        "the source overlaps the target: they may be apart, or the same range of one type");
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
      return attach(session, smb::read_as<smb::Attach>(body));
    case smb::Opcode::kExists:
      return with_body(smb::KeyFound{registry_.exists(smb::read_as<smb::KeyQuery>(body).key)});
    default:
      throw Refusal(smb::Status::kMalformed,
                    std::string(smb::opcode_name(opcode)) + " is no request to carry out");
  }
}

Reply Requests::carry_out_sequenced(Session& session, smb::Opcode opcode,
                                    std::span<const std::byte> body) {
  const auto sequence = smb::read_as<smb::Sequence>(body);
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
      return alloc(session, smb::read_as<smb::Alloc>(body));
    case smb::Opcode::kFree:
      return free(session, smb::read_as<smb::Release>(body));
    case smb::Opcode::kDelete:
      return remove(session, smb::read_as<smb::Release>(body));
    case smb::Opcode::kAccumulate:
      return accumulate(session, smb::read_as<smb::Accumulate>(body));
    default:
      return fetch_add(session, smb::read_as<smb::FetchAdd>(body));
  }
}

Reply Requests::answer_again(const Session& session, smb::Opcode opcode,
                             std::span<const std::byte> body) {
  Reply reply = session.window.saved(smb::read_as<smb::Sequence>(body).number);
  if (opcode == smb::Opcode::kAlloc && reply.status == smb::Status::kOk) {
    const SessionAttachment attachment = attached(session, smb::read_as<smb::Alloc>(body).handle);
    reply.granted = attachment.segment;
    reply.may_write = attachment.may_write;
  }
  return reply;
}

Reply Requests::answer_from_record(Session& session, smb::Opcode opcode,
                                   std::span<const std::byte> body) {
  const RequestOutcome* outcome = session.record.outcome(smb::read_as<smb::Sequence>(body).number);
  if (outcome == nullptr) {
    throw Refusal(smb::Status::kMalformed, "how the request ended is known no more");
  }
  if (outcome->status != smb::Status::kOk) {
    throw Refusal(outcome->status, "it was refused so before the box was restarted");
  }
  if (opcode == smb::Opcode::kAlloc) return alloc_again(session, smb::read_as<smb::Alloc>(body));
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

Reply Requests::accumulate(Session& session, const smb::Accumulate& request) {
  const SessionAttachment target = attached(session, request.target);
  const SessionAttachment source = attached(session, request.source);
  require_write(session, target);
  const Formula formula = formula_of(request);
  require_range(*target.segment, request.target_offset, request.bytes,
                element_size(formula.target));
  require_range(*source.segment, request.source_offset, formula.source_bytes(request.bytes),
                element_size(formula.source));
  require_apart(request, formula, target.segment.get(), source.segment.get());
  accumulator_.accumulate(session.record, request.sequence.number,
                          {*target.segment, request.target_offset},
                          {*source.segment, request.source_offset}, request.bytes, formula);
  for (Counters* counters : {&totals_, &session.counters, &target.segment->counters}) {
    counters->count(smb::Opcode::kAccumulate, request.bytes);
  }
  return {};
}

Reply Requests::fetch_add(Session& session, const smb::FetchAdd& request) {
  const SessionAttachment cell = attached(session, request.handle);
  require_write(session, cell);
  require_range(*cell.segment, request.offset, sizeof(int64_t), sizeof(int64_t));
  const int64_t before = accumulator_.fetch_add(session.record, request.sequence.number,
                                                {*cell.segment, request.offset}, request.addend);
  for (Counters* counters : {&totals_, &session.counters, &cell.segment->counters}) {
    counters->count(smb::Opcode::kFetchAdd, sizeof before);
  }
  return with_body(smb::Fetched{before});
}

}  // namespace hbm::box
