#include "box/server/listener/stream_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <exception>
#include <utility>

#include "base/error.h"
#include "box/protocol/socket.h"

namespace hbm::box {
namespace {

using Flow = smb::FrameStream::Flow;
using Next = EventLoop::Next;

constexpr uint32_t kMostUnanswered = 2 * smb::kWindow;  // requests of one connection

}  // namespace

StreamConnection::StreamConnection(StreamContext& context, EventLoop& loop, Descriptor socket,
                                   smb::TransportKind transport)
    : context_(context),
      loop_(loop),
      transport_(transport),
      fd_(socket.get()),
      handshake_(context.handler, context.identity, transport),
      stream_(std::in_place, std::move(socket), smb::Payloads::kShared) {
  smb::Header header;
  header.opcode = smb::Opcode::kHello;
  stream_->queue(header, std::as_bytes(std::span(&handshake_.hello(), 1)));
  over_ = !send();
  interest_ = EPOLLIN;
}

// Turns

Next StreamConnection::serve(uint32_t events) noexcept {
  take();
  Next next = Next::kGone;
  try {
    try {
      next = work(events);
    } catch (const smb::Forged& forged) {
      request_ = {};  // it is about the connection, not about what came last
      reject(smb::Status::kMalformed, forged.what());
    } catch (const Error& error) {
      const bool theirs = error.kind() == ErrorKind::kNetwork;
      reject(theirs ? smb::Status::kMalformed : smb::Status::kInternal, error.what());
    }
  } catch (const std::exception& error) {
    context_.refusals.warn(std::string("closed a client's connection: ") + error.what());
  }
  over_ = over_ || next == Next::kGone;
  return settle() ? next : Next::kGone;
}

Next StreamConnection::work(uint32_t events) {
  if (events != EPOLLIN) blocked_ = false;
  if (over_ || !send()) return Next::kGone;
  Flow flow = Flow::kIdle;
  served_ = 0;
  if (readable()) {
    flow = stream_->receive(*this, context_.quantum);
    if (flow == Flow::kClosed || !send()) return Next::kGone;
  } else if ((events & (EPOLLHUP | EPOLLERR)) != 0) {
    return Next::kGone;
  }
  stalled_ = !readable();
  return flow == Flow::kMore && !stalled_ ? Next::kAgain : Next::kWait;
}

bool StreamConnection::readable() const noexcept {
  return !over_ && unanswered_ < kMostUnanswered && stream_->queued_bytes() < context_.quantum &&
         !context_.draining.load(std::memory_order_relaxed);
}

bool StreamConnection::send() {
  if (blocked_ || stream_->queued_bytes() == 0) return true;
  const Flow flow = stream_->flush();
  blocked_ = flow == Flow::kBlocked;
  return flow != Flow::kClosed;
}

void StreamConnection::watch() noexcept {
  const uint32_t reading = readable() ? uint32_t{EPOLLIN} : 0;
  const uint32_t writing = stream_->queued_bytes() > 0 ? uint32_t{EPOLLOUT} : 0;
  if (std::exchange(interest_, reading | writing) != interest_) {
    loop_.change(fd_, interest_, *this);
  }
}

// Holding the stream

void StreamConnection::take() {
  std::unique_lock lock(mutex_);
  given_.wait(lock, [this] { return !held_; });
  held_ = true;
}

bool StreamConnection::give() {
  const std::lock_guard lock(mutex_);
  if (!answers_.empty() && !over_) return false;
  held_ = false;
  given_.notify_one();
  return true;
}

void StreamConnection::answered(const smb::Header& request, Reply&& reply) {
  {
    const std::lock_guard lock(mutex_);
    if (gone_) return;
    answers_.push_back({request, std::move(reply)});
    if (std::exchange(held_, true)) return;
  }
  settle();
}

bool StreamConnection::settle() noexcept {
  bool alive = true;
  do {
    alive = send_answers();
    if (!alive) {
      over_ = true;
      ::shutdown(fd_, SHUT_RDWR);  // has the loop let go of it
    } else {
      watch();
      if (std::exchange(stalled_, !readable()) && readable()) loop_.again(*this);
    }
  } while (!give());
  return alive;
}

bool StreamConnection::send_answers() noexcept {
  std::vector<Answered> answers;
  {
    const std::lock_guard lock(mutex_);
    answers.swap(answers_);
  }
  if (over_) return false;
  try {
    for (Answered& answer : answers) reply(answer.request, std::move(answer.reply));
    return send();
  } catch (const std::exception& error) {
    context_.refusals.warn("closed the connection of " + smb::peer_name(fd_) + ": " + error.what());
    return false;
  }
}

// The end

void StreamConnection::dismiss(const char* cause) noexcept {
  const std::lock_guard lock(mutex_);
  if (gone_) return;
  context_.refusals.warn("closed the connection of " + smb::peer_name(fd_) + ": " + cause);
  ::shutdown(fd_, SHUT_RDWR);  // has the loop let go of it
}

void StreamConnection::gone() noexcept {
  take();
  std::vector<Answered> unsent;
  {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    unsent.swap(answers_);
  }
  over_ = true;
  stream_.reset();
  writing_ = {};
  context_.pending.leave(*this);
  if (session_) context_.handler.left(std::exchange(session_, nullptr));
  give();
}

void StreamConnection::part_from_ended_session() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (gone_ || std::exchange(held_, true)) return;
  }
  if (session_ && unanswered_ == 0 && context_.handler.ended(session_)) {
    over_ = std::exchange(parting_, true) || over_;
  }
  settle();
}

bool StreamConnection::idle() {
  take();
  if (!stream_) {
    give();
    return true;
  }
  const bool nothing_left = unanswered_ == 0 && stream_->queued_bytes() == 0;
  settle();
  return nothing_left;
}

}  // namespace hbm::box
