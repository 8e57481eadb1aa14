#include <string>
#include <utility>

#include "box/server/request_handler.h"
#include "box/server/requests.h"

namespace hbm::box {
namespace {

constexpr uint32_t kFlags = smb::Alloc::kReadOnly | smb::Alloc::kTemporary | smb::Alloc::kAnySize;

void require_flags(uint32_t flags) {
  if ((flags & ~kFlags) != 0) {
    throw Refusal(smb::Status::kMalformed, "it has flags that do not exist");
  }
}

Registry::Size size_of(uint32_t flags) {
  return (flags & smb::Alloc::kAnySize) != 0 ? Registry::Size::kAny : Registry::Size::kSame;
}

Creation creation_of(const Session& session, const smb::Alloc& request) {
  if (session.identity().read_only) {
    throw Refusal(smb::Status::kReadOnly, "a read-only client creates no segment");
  }
  if (request.size == 0) {
    throw Refusal(smb::Status::kRange, "a new segment has at least one byte");
  }
  return {.key = request.key,
          .size = request.size,
          .temporary = (request.flags & smb::Alloc::kTemporary) != 0,
          .creator = {session.identity().id, request.sequence.number}};
}

Reply allocated(const SessionAttachment& attachment, bool created) {
  Reply reply = with_body(smb::Allocated{.key = attachment.segment->key,
                                         .size = attachment.segment->size,
                                         .created = created,
                                         .reserved = 0,
                                         .address = 0});
  reply.granted = attachment.segment;
  reply.may_write = attachment.may_write;
  return reply;
}

// The first request after a restart may be one that the box was killed in, when its effect was in
// the store and its number was not: its segment is gone, and cannot be attached again.
bool perhaps_done(const Session& session, const smb::Sequence& sequence) {
  return session.identity().restored && sequence.number == session.window.restored() + 1;
}

}  // namespace

Reply Requests::alloc(Session& session, const smb::Alloc& request) {
  require_flags(request.flags);
  if (session.attachment(request.handle).segment != nullptr) {
    throw Refusal(smb::Status::kMalformed,
                  "the handle " + std::to_string(request.handle) + " is in use");
  }
  OpenedSegment opened;
  if (session.identity().restored) opened = created_before(session, request);
  if (opened.segment == nullptr) opened = open(session, request);
  return grant(session, request.handle, request.flags, std::move(opened));
}

Reply Requests::alloc_again(Session& session, const smb::Alloc& request) {
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

OpenedSegment Requests::created_before(const Session& session, const smb::Alloc& request) {
  return registry_.created_by({session.identity().id, request.sequence.number});
}

OpenedSegment Requests::open(const Session& session, const smb::Alloc& request) {
  const Registry::Size size = size_of(request.flags);
  const bool may_create = !session.identity().read_only && size == Registry::Size::kSame;
  switch (request.mode) {
    case smb::AllocMode::kCreate:
      return registry_.create(creation_of(session, request));
    case smb::AllocMode::kAttach:
      return registry_.attach(request.key, request.size, size);
    case smb::AllocMode::kAuto:
      if (request.key && !may_create) return registry_.attach(request.key, request.size, size);
      return registry_.attach_or_create(creation_of(session, request));
  }
  throw Refusal(smb::Status::kMalformed, "its mode does not exist");
}

Reply Requests::grant(Session& session, uint32_t handle, uint32_t flags, OpenedSegment opened) {
  const bool read_only = session.identity().read_only || (flags & smb::Alloc::kReadOnly) != 0;
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

Reply Requests::attach(Session& session, const smb::Attach& request) {
  require_flags(request.flags);
  const SessionAttachment attachment = session.attachment(request.handle);
  if (attachment.segment == nullptr) {
    return grant(session, request.handle, request.flags,
                 registry_.attach(request.key, request.size, size_of(request.flags)));
  }
  if (attachment.segment->key != request.key) {
    throw Refusal(smb::Status::kMalformed,
                  "the handle " + std::to_string(request.handle) + " stands for another segment");
  }
  return allocated(attachment, false);
}

Reply Requests::free(Session& session, const smb::Release& request) {
  const SessionAttachment attachment = session.detach(request.handle);
  if (attachment.segment != nullptr) {
    registry_.release(attachment.segment);
  } else if (!perhaps_done(session, request.sequence)) {
    attached(session, request.handle);
  }
  return {};
}

Reply Requests::remove(Session& session, const smb::Release& request) {
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

}  // namespace hbm::box
