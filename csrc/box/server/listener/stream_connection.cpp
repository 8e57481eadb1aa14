#include "box/server/listener/stream_connection.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "box/protocol/socket.h"
#include "box/server/storage/segment.h"
#include "box/server/tuning.h"

namespace hbm::box::server::listener {
namespace {

using Flow = protocol::FrameStream::Flow;
using Next = EventLoop::Next;

template <protocol::Body T>
std::span<const std::byte> bytes_of(const T& body) {
  return std::as_bytes(std::span(&body, 1));
}

[[noreturn]] void malformed(const char* cause) {
  throw Error(ErrorKind::kNetwork, std::string("a frame is malformed: ") + cause);
}

protocol::Header reply_to(const protocol::Header& request, protocol::Status status) {
  protocol::Header header;
  header.opcode = request.opcode;
  header.status = status;
  header.id = request.id;
  return header;
}

}  // namespace

StreamConnection::StreamConnection(StreamContext& context, EventLoop& loop, Descriptor socket,
                                   protocol::TransportKind transport)
    : context_(context),
      loop_(loop),
      transport_(transport),
      fd_(socket.get()),
      handshake_(context.handler, context.identity, transport),
      stream_(std::in_place, std::move(socket), protocol::Payloads::kShared) {
  protocol::Header header;
  header.opcode = protocol::Opcode::kHello;
  stream_->queue(header, std::as_bytes(std::span(&handshake_.hello(), 1)));
  over_ = !send();
  interest_ = EPOLLIN;
}

// Turns

Next StreamConnection::serve(uint32_t events) noexcept {
  acquire();
  Next next = Next::kGone;
  try {
    try {
      next = work(events);
    } catch (const protocol::Forged& forged) {
      request_ = {};  // the error concerns the connection, not the last request
      reject(protocol::Status::kMalformed, forged.what());
    } catch (const Error& error) {
      const bool theirs = error.kind() == ErrorKind::kNetwork;
      reject(theirs ? protocol::Status::kMalformed : protocol::Status::kInternal, error.what());
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
  return !over_ && unanswered_ < kMostUnansweredPerConnection &&
         stream_->queued_bytes() < context_.quantum &&
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

void StreamConnection::acquire() {
  std::unique_lock lock(mutex_);
  released_.wait(lock, [this] { return !held_; });
  held_ = true;
}

bool StreamConnection::release() {
  const std::lock_guard lock(mutex_);
  if (!answers_.empty() && !over_) return false;
  held_ = false;
  released_.notify_one();
  return true;
}

void StreamConnection::answered(const protocol::Header& request, Reply&& reply) {
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
      ::shutdown(fd_, SHUT_RDWR);  // makes the loop remove the connection
    } else {
      watch();
      if (std::exchange(stalled_, !readable()) && readable()) loop_.again(*this);
    }
  } while (!release());
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
    context_.refusals.warn("closed the connection of " + protocol::peer_name(fd_) + ": " +
                           error.what());
    return false;
  }
}

// Requests

const char* StreamConnection::check(const protocol::Header& header) {
  request_ = header;
  const bool joins = header.opcode == protocol::Opcode::kJoin;
  if (const char* cause = protocol::malformed_request(header)) return cause;
  if (session_ && joins) return "the client has joined before";
  if (!session_ && !joins) return "the client has not joined";
  return nullptr;
}

std::byte* StreamConnection::payload_destination(const protocol::Header& /*header*/,
                                                 std::span<const std::byte> body) {
  begin_write(protocol::read_as<protocol::Transfer>(body));  // only kWrite has a payload
  return writing_.at;
}

void StreamConnection::frame(const protocol::Header& header, std::span<const std::byte> body,
                             Descriptor /*descriptor*/) {
  switch (header.opcode) {
    case protocol::Opcode::kJoin:
      join(protocol::read_as<protocol::Join>(body));
      break;
    case protocol::Opcode::kRead:
      read(protocol::read_as<protocol::Transfer>(body));
      break;
    case protocol::Opcode::kWrite:
      if (header.payload_bytes == 0) begin_write(protocol::read_as<protocol::Transfer>(body));
      end_write();
      break;
    default:
      submit(body);
  }
  served_ += sizeof(header) + body.size() + header.payload_bytes;
  if (served_ >= context_.quantum || !readable()) stream_->pause();
}

void StreamConnection::join(const protocol::Join& join) {
  Handshake::Admission admission = handshake_.join(join, protocol::peer_host(fd_));
  context_.pending.leave(*this);
  if (!admission.session) return reject(admission.status, admission.cause);
  session_ = std::move(admission.session);
  stream_->queue(reply_to(request_, protocol::Status::kOk), bytes_of(admission.joined));
  if (!admission.keys) return;
  send();
  stream_->authenticate(admission.keys->to_client, admission.keys->to_box);
}

void StreamConnection::read(const protocol::Transfer& transfer) {
  if (transfer.bytes > protocol::kMaxPayload) malformed("it asks for more than a payload holds");
  Access access = context_.handler.access(session_, transfer, false);
  if (access.status != protocol::Status::kOk) return refuse(request_, access.status, access.cause);
  stream_->queue(reply_to(request_, protocol::Status::kOk), {}, {access.at, transfer.bytes},
                 std::move(access.segment));
  served_ += transfer.bytes;
}

void StreamConnection::begin_write(const protocol::Transfer& transfer) {
  if (transfer.bytes != request_.payload_bytes) malformed("its payload has another size");
  writing_ = context_.handler.access(session_, transfer, true);
  if (writing_.status != protocol::Status::kOk) writing_.at = nullptr;
}

void StreamConnection::end_write() {
  const Access written = std::exchange(writing_, {});
  if (written.status != protocol::Status::kOk)
    return refuse(request_, written.status, written.cause);
  stream_->queue(reply_to(request_, protocol::Status::kOk), {});
}

void StreamConnection::submit(std::span<const std::byte> body) {
  ++unanswered_;
  context_.handler.submit(session_, request_.opcode, body,
                          [self = shared_from_this(), request = request_](Reply reply) {
                            self->answered(request, std::move(reply));
                          });
}

void StreamConnection::reply(const protocol::Header& request, Reply&& reply) {
  --unanswered_;
  Descriptor descriptor = grant(reply);
  if (reply.status != protocol::Status::kOk) return refuse(request, reply.status, reply.cause);
  const auto payload = std::make_shared<const std::vector<std::byte>>(std::move(reply.payload));
  stream_->queue(reply_to(request, protocol::Status::kOk), reply.body, *payload, payload,
                 std::move(descriptor));
}

// Returns a descriptor of the granted segment for a client on a Unix socket, else none. On failure
// sets the status and the cause of the reply.
Descriptor StreamConnection::grant(Reply& reply) const {
  if (!reply.granted || reply.status != protocol::Status::kOk ||
      transport_ != protocol::TransportKind::kShm) {
    return {};
  }
  try {
    const memory::PoolBlock& block = *reply.granted->block;
    if (!reply.may_write) return block.read_only();
    Descriptor copy(fcntl(block.fd(), F_DUPFD_CLOEXEC, 0));
    if (copy) return copy;
    reply.cause = std::string("cannot duplicate the segment's descriptor: ") + std::strerror(errno);
  } catch (const Error& error) {
    reply.cause = error.what();
  }
  reply.status = protocol::Status::kInternal;
  log::error(reply.cause);
  return {};
}

void StreamConnection::refuse(const protocol::Header& request, protocol::Status status,
                              const std::string& cause) {
  const auto text = std::make_shared<const std::string>(
      cause.empty() ? std::string(protocol::status_name(status)) : cause);
  stream_->queue(reply_to(request, status), {}, std::as_bytes(protocol::sent_cause(*text)), text);
}

void StreamConnection::reject(protocol::Status status, const std::string& cause) {
  context_.refusals.warn("closed the connection of " + protocol::peer_name(fd_) + ": " + cause);
  // If the last header has no valid opcode, the refusal is sent as a second Hello, which concerns
  // the connection.
  if (*protocol::opcode_name(request_.opcode) == '\0') request_.opcode = protocol::Opcode::kHello;
  refuse(request_, status, cause);
  send();
  over_ = true;
}

// The end

void StreamConnection::dismiss(const char* cause) noexcept {
  const std::lock_guard lock(mutex_);
  if (gone_) return;
  context_.refusals.warn("closed the connection of " + protocol::peer_name(fd_) + ": " + cause);
  ::shutdown(fd_, SHUT_RDWR);  // makes the loop remove the connection
}

void StreamConnection::gone() noexcept {
  acquire();
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
  release();
}

void StreamConnection::close_if_session_ended() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (gone_ || std::exchange(held_, true)) return;
  }
  if (session_ && unanswered_ == 0 && context_.handler.ended(session_)) {
    over_ = std::exchange(session_ended_, true) || over_;
  }
  settle();
}

bool StreamConnection::idle() {
  acquire();
  if (!stream_) {
    release();
    return true;
  }
  const bool nothing_left = unanswered_ == 0 && stream_->queued_bytes() == 0;
  settle();
  return nothing_left;
}

}  // namespace hbm::box::server::listener
