// A new connection for a broken one, with what the old one had.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "box/client/core.h"

namespace hbm::client {
namespace {

constexpr auto kAttachPatience = std::chrono::seconds(30);
constexpr auto kLook = std::chrono::milliseconds(100);  // for a close()
constexpr uint64_t kAll = UINT64_MAX;                   // numbers

}  // namespace

struct Core::Renewal {
  std::shared_ptr<Attachment> attachment;
  std::unique_ptr<transport::TransportRequest> request;
};

bool Core::try_again(std::chrono::milliseconds timeout) {
  std::vector<Renewal> renewals;  // outlives the transport, which may hold their requests
  try {
    bool same_session = true;
    transport::OpenedTransport opened;
    try {
      opened = dialer_.dial_again(session_, timeout);
      same_session = remembers(opened.joined.applied);
    } catch (const transport::Refused& refused) {
      if (refused.status() != smb::Status::kExpired) throw;
      same_session = false;
    }
    if (!same_session) opened = dialer_.dial_again({}, timeout);
    if (opened.joined.box == contents_) {
      attach_again(*opened.transport, same_session ? opened.joined.applied : kAll, renewals);
    }
    resume(opened, renewals, same_session);
    return true;
  } catch (const std::exception& error) {
    const Lock lock(mutex_);
    last_attempt_ = error.what();
    return false;
  }
}

// A box that forgot what it had answered (its host crashed, say) cannot go on with the session.
bool Core::remembers(uint64_t applied) const {
  const Lock lock(mutex_);
  const uint64_t oldest = outstanding_.empty() ? next_number_ : *outstanding_.begin();
  return oldest <= applied + 1 && applied < next_number_;
}

void Core::attach_again(transport::Transport& transport, uint64_t applied,
                        std::vector<Renewal>& renewals) {
  {
    const Lock lock(mutex_);
    for (const auto& [handle, attachment] : attachments_) {
      if (attachment->state != AttachmentState::kLost) renewals.push_back({attachment, nullptr});
    }
  }
  // An attachment that the box has freed already, or freed with the last session, must not come
  // back.
  for (const OperationPointer& operation : posted_) {
    if (operation->opcode() != smb::Opcode::kFree || operation->number > applied) continue;
    std::erase_if(renewals, [&](const Renewal& renewal) {
      return renewal.attachment == operation->touches[0].attachment;
    });
  }
  for (Renewal& renewal : renewals) {
    const Attachment& attachment = *renewal.attachment;
    const smb::Attach body{.key = attachment.key,
                           .size = attachment.size,
                           .handle = attachment.handle,
                           .flags = (attachment.read_only ? smb::Alloc::kReadOnly : 0) |
                                    (attachment.temporary ? smb::Alloc::kTemporary : 0)};
    const auto bytes = std::as_bytes(std::span(&body, 1));
    renewal.request = std::make_unique<transport::TransportRequest>();
    renewal.request->opcode = smb::Opcode::kAttach;
    renewal.request->body.assign(bytes.begin(), bytes.end());
    transport.post(*renewal.request);
  }
  const auto deadline = Clock::now() + kAttachPatience;
  for (const Renewal& renewal : renewals) {
    while (!renewal.request->finished()) {
      if (Clock::now() > deadline)
        throw transport::Broken("the box does not attach the segments again");
      transport.progress(kLook);
      const Lock lock(mutex_);
      if (stopping_) throw transport::Broken("the client is being closed");
    }
    const smb::Status status = renewal.request->status;
    if (status == smb::Status::kExpired || status == smb::Status::kClosing) {
      throw transport::Broken(renewal.request->cause);
    }
  }
}

void Core::resume(transport::OpenedTransport& opened, std::vector<Renewal>& renewals,
                  bool same_session) {
  Operations again;
  {
    const Lock lock(mutex_);
    const bool same_contents = opened.joined.box == contents_;
    transport_ = std::move(opened.transport);
    registered_memory_.renew();
    session_ = opened.joined.session;
    contents_ = opened.joined.box;
    lease_ = std::chrono::milliseconds(opened.joined.lease_ms);
    next_ping_ = Clock::now() + lease_ / 3;
    for (const Renewal& renewal : renewals) {
      if (renewal.request->status == smb::Status::kOk) {
        renewal.attachment->grant = renewal.request->granted;
      } else {
        if (renewal.request->status == smb::Status::kNoSuchKey) settle_deletes(*renewal.attachment);
        lose(*renewal.attachment,
             "the box at " + dialer_.box() + " came back without it: " + renewal.request->cause);
      }
    }
    if (!same_contents) {
      for (const auto& [handle, attachment] : attachments_) {
        lose(*attachment, "the box at " + dialer_.box() +
                              " restarted without its data, and the segment is gone");
      }
    }
    again = unanswered(same_session, same_contents);
    state_ = ConnectionState::kUp;
    const bool said = fruitless_ > 0 && same_contents;
    log::write((warned_ && !said) || !same_contents ? log::Level::kWarn : log::Level::kInfo,
               "connected again to the box at " + dialer_.box() +
                   (same_contents ? "" : ", which restarted without its data"));
  }
  try {
    send(again);
  } catch (const std::exception& error) {
    const Lock lock(mutex_);
    break_off(error.what());
  }
}

void Core::lose(Attachment& attachment, const std::string& why) {
  if (attachment.state == AttachmentState::kLost) return;
  attachment.state = AttachmentState::kLost;
  attachment.why = why;
  for (ClientOperation* operation : *attachment.unfinished) {
    if (operation->touches[0].attachment.get() == &attachment &&
        operation->opcode() == smb::Opcode::kFree) {
      operation->settle();
    } else if (std::optional<Failure> failure = reason_to_fail(*operation)) {
      fail(*operation, *failure);
    }
  }
}

// Settles the deletes that the box may have carried out: their key is gone, as they wanted.
void Core::settle_deletes(const Attachment& attachment) {
  for (ClientOperation* operation : *attachment.unfinished) {
    const bool sent = operation->opcode() == smb::Opcode::kDelete && operation->number > 0;
    if (sent && !operation->settled()) operation->settle();
  }
}

// Empties posted_, which the last transport had: returns the requests to send again, in their
// order; finishes the others, or makes them ready to start afresh.
Core::Operations Core::unanswered(bool same_session, bool same_contents) {
  Operations again;
  Operations afresh;
  in_flight_ = 0;
  outstanding_.clear();
  if (!same_session) next_number_ = 1;
  for (OperationPointer& operation : std::exchange(posted_, {})) {
    const bool refused =
        operation->request.finished() && operation->request.status == smb::Status::kExpired;
    if (operation->number > 0 && !same_session) {
      operation->number = 0;
      if (operation->opcode() == smb::Opcode::kFree) {  // the last session's end has freed it
        dismiss(*operation->touches[0].attachment);
        finish(std::move(operation));
        continue;
      }
      if (!operation->settled() && (refused || !same_contents)) {
        operation->stage = ClientOperation::Stage::kReady;
        afresh.push_back(std::move(operation));
        continue;
      }
      fail(*operation,
           failure(BoxError::Cause::kUnreachable,
                   operation->text() + ": the connection to the box at " + dialer_.box() +
                       " was lost for longer than the client's lease; it may or may not have been "
                       "carried out"));
    }
    if (operation->settled() && operation->number == 0) {
      finish(std::move(operation));
      continue;
    }
    operation->request.status = smb::Status::kOk;
    operation->request.cause.clear();
    operation->request.reply.clear();
    operation->request.payload.clear();
    operation->request.granted.reset();
    operation->request.done.store(false, std::memory_order_relaxed);
    if (operation->number > 0) {
      number(*operation);
    } else {
      ++in_flight_;
    }
    again.push_back(std::move(operation));
  }
  sequenced_.insert(sequenced_.begin(), afresh.begin(), afresh.end());
  return again;
}

}  // namespace hbm::client
