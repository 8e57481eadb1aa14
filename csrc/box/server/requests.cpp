#include "box/server/requests.h"

#include <new>
#include <string>
#include <utility>

#include "base/dtype.h"
#include "base/error.h"
#include "base/log.h"
#include "box/server/request_handler.h"
#include "kernels/accumulate.h"

namespace hbm::box::server {
namespace {

// Runs `action`; an exception becomes the reply.
template <class Action>
Reply answered(protocol::Opcode opcode, Action&& action) noexcept {
  const auto failed = [opcode](const char* cause) {
    log::error(std::string("a client's ") + protocol::opcode_name(opcode) + " failed: " + cause);
    return refused(protocol::Status::kInternal, cause);
  };
  try {
    return action();
  } catch (const Refusal& refusal) {
    return refused(refusal.status(), refusal.what());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kExhausted) return failed(error.what());
    return refused(protocol::Status::kExhausted, error.what());
  } catch (const std::bad_alloc&) {
    return refused(protocol::Status::kExhausted, "the box's process is out of memory");
  } catch (const std::exception& error) {
    return failed(error.what());
  }
}

kernels::Formula formula_of(const protocol::Accumulate& request) {
  if (request.dtype >= kDtypeCount || request.source_dtype >= kDtypeCount) {
    throw Refusal(protocol::Status::kMalformed, "its type does not exist");
  }
  if (request.combine >= kCombineCount) {
    throw Refusal(protocol::Status::kMalformed, "it neither adds nor assigns");
  }
  const kernels::Formula formula{.target = static_cast<Dtype>(request.dtype),
                                 .source = static_cast<Dtype>(request.source_dtype),
                                 .combine = static_cast<Combine>(request.combine),
                                 .scale = request.scale};
  if (const char* cause = kernels::accumulate_unsupported(formula.target, formula.source)) {
    throw Refusal(protocol::Status::kUnsupported, std::string("cannot accumulate ") +
                                                      dtype_name(formula.source) + " into " +
                                                      dtype_name(formula.target) + ": " + cause);
  }
  return formula;
}

void require_apart(const protocol::Accumulate& request, const kernels::Formula& formula,
                   const storage::BoxSegment* target, const storage::BoxSegment* source) {
  const uint64_t to = request.target_offset, from = request.source_offset;
  if (target != source || (to == from && formula.target == formula.source)) return;
  if (to < from + formula.source_bytes(request.bytes) && from < to + request.bytes) {
    throw Refusal(
        protocol::Status::kUnsupported,
        "the source overlaps the target: they may be apart, or the same range of one type");
  }
}

constexpr uint32_t kFlags =
    protocol::Alloc::kReadOnly | protocol::Alloc::kTemporary | protocol::Alloc::kAnySize;

void require_flags(uint32_t flags) {
  if ((flags & ~kFlags) != 0) {
    throw Refusal(protocol::Status::kMalformed, "it has flags that do not exist");
  }
}

Registry::Size size_of(uint32_t flags) {
  return (flags & protocol::Alloc::kAnySize) != 0 ? Registry::Size::kAny : Registry::Size::kSame;
}

storage::Creation creation_of(const Session& session, const protocol::Alloc& request) {
  if (session.identity().read_only) {
    throw Refusal(protocol::Status::kReadOnly, "a read-only client creates no segment");
  }
  if (request.size == 0) {
    throw Refusal(protocol::Status::kRange, "a new segment has at least one byte");
  }
  return {.key = request.key,
          .size = request.size,
          .temporary = (request.flags & protocol::Alloc::kTemporary) != 0,
          .creator = {session.identity().id, request.sequence.number}};
}

Reply allocated(const SessionAttachment& attachment, bool created) {
  Reply reply = with_body(protocol::Allocated{.key = attachment.segment->key,
                                              .size = attachment.segment->size,
                                              .created = created,
                                              .reserved = 0,
                                              .address = 0});
  reply.granted = attachment.segment;
  reply.may_write = attachment.may_write;
  return reply;
}

// Returns true if a kFree or kDelete may have been executed before the restart. The box may have
// been killed after it changed the store, and before it recorded the number. Then the segment is
// gone and the client could not attach to it again, so the request must not be refused as
// kNotAttached. Only the first number after the restart can be in this state.
bool perhaps_done(const Session& session, const protocol::Sequence& sequence) {
  return session.identity().restored && sequence.number == session.request_cache.restored() + 1;
}

}  // namespace

Requests::Requests(Registry& registry, Sessions& sessions, storage::Records& records,
                   Accumulator& accumulator, storage::Counters& totals)
    : registry_(registry),
      sessions_(sessions),
      records_(records),
      accumulator_(accumulator),
      totals_(totals) {}

Reply Requests::dispatch(Session& session, protocol::Opcode opcode,
                         std::span<const std::byte> body) noexcept {
  return answered(opcode, [&]() -> Reply {
    if (!protocol::sequenced(opcode)) return execute(session, opcode, body);
    const auto sequence = protocol::read_as<protocol::Sequence>(body);
    const DuplicateRequestCache::Kind kind = session.request_cache.classify(sequence);
    if (kind != DuplicateRequestCache::Kind::kNew) return replay(session, opcode, body, kind);
    const Reply reply = answered(opcode, [&] { return execute(session, opcode, body); });
    if (session.request_cache.applied() <
        sequence.number) {  // the accumulator finishes its own requests
      records_.finish(session.record, {.number = sequence.number, .status = reply.status});
    }
    session.request_cache.save(reply);
    return reply;
  });
}

Reply Requests::execute(Session& session, protocol::Opcode opcode,
                        std::span<const std::byte> body) {
  switch (opcode) {
    case protocol::Opcode::kPing:
      return {};
    case protocol::Opcode::kLeave:
      return leave(session);
    case protocol::Opcode::kAttach:
      return attach(session, protocol::read_as<protocol::Attach>(body));
    case protocol::Opcode::kExists:
      return with_body(
          protocol::KeyFound{registry_.exists(protocol::read_as<protocol::KeyQuery>(body).key)});
    case protocol::Opcode::kAlloc:
      return alloc(session, protocol::read_as<protocol::Alloc>(body));
    case protocol::Opcode::kFree:
      return free(session, protocol::read_as<protocol::Release>(body));
    case protocol::Opcode::kDelete:
      return remove(session, protocol::read_as<protocol::Release>(body));
    case protocol::Opcode::kAccumulate:
      return accumulate(session, protocol::read_as<protocol::Accumulate>(body));
    case protocol::Opcode::kFetchAdd:
      return fetch_add(session, protocol::read_as<protocol::FetchAdd>(body));
    default:
      throw Refusal(protocol::Status::kMalformed,
                    std::string(protocol::opcode_name(opcode)) + " is no request to execute");
  }
}

Reply Requests::replay(Session& session, protocol::Opcode opcode, std::span<const std::byte> body,
                       DuplicateRequestCache::Kind kind) {
  const uint64_t number = protocol::read_as<protocol::Sequence>(body).number;
  if (kind == DuplicateRequestCache::Kind::kSaved) {
    Reply reply = session.request_cache.saved(number);
    if (opcode == protocol::Opcode::kAlloc && reply.status == protocol::Status::kOk) {
      const SessionAttachment attachment =
          attached(session, protocol::read_as<protocol::Alloc>(body).handle);
      reply.granted = attachment.segment;
      reply.may_write = attachment.may_write;
    }
    return reply;
  }
  const storage::RequestOutcome* outcome = session.record.outcome(number);
  if (outcome == nullptr) {
    throw Refusal(protocol::Status::kMalformed, "the outcome of the request is no longer stored");
  }
  if (outcome->status != protocol::Status::kOk) {
    throw Refusal(outcome->status, "the request was refused before the box restarted");
  }
  if (opcode == protocol::Opcode::kAlloc)
    return replay_alloc(session, protocol::read_as<protocol::Alloc>(body));
  if (opcode != protocol::Opcode::kFetchAdd) return {};
  return with_body(protocol::Fetched{outcome->value});
}

SessionAttachment attached(const Session& session, uint32_t handle) {
  SessionAttachment attachment = session.attachment(handle);
  if (attachment.segment == nullptr) {
    throw Refusal(protocol::Status::kNotAttached,
                  "nothing is attached with the handle " + std::to_string(handle));
  }
  return attachment;
}

void require_write(const Session& session, const SessionAttachment& attachment) {
  if (session.identity().read_only) {
    throw Refusal(protocol::Status::kReadOnly, "the client joined as a read-only one");
  }
  if (!attachment.may_write) {
    throw Refusal(protocol::Status::kReadOnly, "the segment was attached for reading alone");
  }
}

void require_range(const storage::BoxSegment& segment, uint64_t offset, uint64_t bytes,
                   uint64_t unit) {
  const auto describe = [&] {
    return std::to_string(bytes) + " bytes at " + std::to_string(offset);
  };
  if (offset > segment.size || bytes > segment.size - offset) {
    throw Refusal(protocol::Status::kRange,
                  describe() + " are outside a segment of " + std::to_string(segment.size));
  }
  if (offset % unit != 0 || bytes % unit != 0) {
    throw Refusal(protocol::Status::kRange,
                  describe() + " are not in multiples of " + std::to_string(unit));
  }
}

Reply Requests::alloc(Session& session, const protocol::Alloc& request) {
  require_flags(request.flags);
  if (session.attachment(request.handle).segment != nullptr) {
    throw Refusal(protocol::Status::kMalformed,
                  "the handle " + std::to_string(request.handle) + " is in use");
  }
  OpenedSegment opened;
  if (session.identity().restored) opened = created_before(session, request);
  if (opened.segment == nullptr) opened = open(session, request);
  return grant(session, request.handle, request.flags, std::move(opened));
}

Reply Requests::replay_alloc(Session& session, const protocol::Alloc& request) {
  const SessionAttachment attachment = session.attachment(request.handle);
  OpenedSegment opened = created_before(session, request);
  if (attachment.segment != nullptr) {
    if (opened.segment != nullptr) registry_.release(opened.segment);
    return allocated(attachment, opened.created);
  }
  if (opened.segment == nullptr) {
    opened = registry_.attach(request.key, request.size, size_of(request.flags));
  }
  return grant(session, request.handle, request.flags, std::move(opened));
}

OpenedSegment Requests::created_before(const Session& session, const protocol::Alloc& request) {
  return registry_.created_by({session.identity().id, request.sequence.number});
}

OpenedSegment Requests::open(const Session& session, const protocol::Alloc& request) {
  const Registry::Size size = size_of(request.flags);
  const bool may_create = !session.identity().read_only && size == Registry::Size::kSame;
  switch (request.mode) {
    case protocol::AllocMode::kCreate:
      return registry_.create(creation_of(session, request));
    case protocol::AllocMode::kAttach:
      return registry_.attach(request.key, request.size, size);
    case protocol::AllocMode::kAuto:
      if (request.key && !may_create) return registry_.attach(request.key, request.size, size);
      return registry_.attach_or_create(creation_of(session, request));
  }
  throw Refusal(protocol::Status::kMalformed, "its mode does not exist");
}

Reply Requests::grant(Session& session, uint32_t handle, uint32_t flags, OpenedSegment opened) {
  const bool read_only = session.identity().read_only || (flags & protocol::Alloc::kReadOnly) != 0;
  const SessionAttachment attachment{std::move(opened.segment), !read_only};
  try {
    session.attach(handle, attachment);
    return allocated(attachment, opened.created);
  } catch (...) {
    session.detach(handle);
    registry_.release(attachment.segment);
    throw;
  }
}

Reply Requests::attach(Session& session, const protocol::Attach& request) {
  require_flags(request.flags);
  const SessionAttachment attachment = session.attachment(request.handle);
  if (attachment.segment == nullptr) {
    return grant(session, request.handle, request.flags,
                 registry_.attach(request.key, request.size, size_of(request.flags)));
  }
  if (attachment.segment->key != request.key) {
    throw Refusal(protocol::Status::kMalformed,
                  "the handle " + std::to_string(request.handle) + " stands for another segment");
  }
  return allocated(attachment, false);
}

Reply Requests::free(Session& session, const protocol::Release& request) {
  const SessionAttachment attachment = session.detach(request.handle);
  if (attachment.segment != nullptr) {
    registry_.release(attachment.segment);
  } else if (!perhaps_done(session, request.sequence)) {
    attached(session, request.handle);
  }
  return {};
}

Reply Requests::remove(Session& session, const protocol::Release& request) {
  if (session.attachment(request.handle).segment == nullptr &&
      perhaps_done(session, request.sequence)) {
    return {};
  }
  const SessionAttachment attachment = attached(session, request.handle);
  require_write(session, attachment);
  registry_.remove(attachment.segment);
  return {};
}

Reply Requests::leave(Session& session) {
  for (const SessionAttachment& attachment : session.detach_all())
    registry_.release(attachment.segment);
  sessions_.forget(session);
  return {};
}

Reply Requests::accumulate(Session& session, const protocol::Accumulate& request) {
  const SessionAttachment target = attached(session, request.target);
  const SessionAttachment source = attached(session, request.source);
  require_write(session, target);
  const kernels::Formula formula = formula_of(request);
  require_range(*target.segment, request.target_offset, request.bytes,
                element_size(formula.target));
  require_range(*source.segment, request.source_offset, formula.source_bytes(request.bytes),
                element_size(formula.source));
  require_apart(request, formula, target.segment.get(), source.segment.get());
  accumulator_.accumulate(session.record, request.sequence.number,
                          {*target.segment, request.target_offset},
                          {*source.segment, request.source_offset}, request.bytes, formula);
  for (storage::Counters* counters : {&totals_, &session.counters, &target.segment->counters}) {
    counters->count(protocol::Opcode::kAccumulate, request.bytes);
  }
  return {};
}

Reply Requests::fetch_add(Session& session, const protocol::FetchAdd& request) {
  const SessionAttachment cell = attached(session, request.handle);
  require_write(session, cell);
  require_range(*cell.segment, request.offset, sizeof(int64_t), sizeof(int64_t));
  const int64_t before = accumulator_.fetch_add(session.record, request.sequence.number,
                                                {*cell.segment, request.offset}, request.addend);
  for (storage::Counters* counters : {&totals_, &session.counters, &cell.segment->counters}) {
    counters->count(protocol::Opcode::kFetchAdd, sizeof before);
  }
  return with_body(protocol::Fetched{before});
}

}  // namespace hbm::box::server
