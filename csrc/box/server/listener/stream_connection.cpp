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

namespace hbm::box {
namespace {

using Flow = smb::FrameStream::Flow;
using Next = EventLoop::Next;

template <smb::Body T>
std::span<const std::byte> bytes_of(const T& body) {
  return std::as_bytes(std::span(&body, 1));
}

[[noreturn]] void malformed(const char* cause) {
  throw Error(ErrorKind::kNetwork, std::string("a frame is malformed: ") + cause);
}

smb::Header reply_to(const smb::Header& request, smb::Status status) {
  smb::Header header;
  header.opcode = request.opcode;
  header.status = status;
  header.id = request.id;
  return header;
}

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

// Requests

const char* StreamConnection::check(const smb::Header& header) {
  request_ = header;
  const bool joins = header.opcode == smb::Opcode::kJoin;
  if (const char* cause = smb::malformed_request(header)) return cause;
  if (session_ && joins) return "the client has joined before";
  if (!session_ && !joins) return "the client has not joined";
  return nullptr;
}

std::byte* StreamConnection::place(const smb::Header& /*header*/, std::span<const std::byte> body) {
  begin_write(smb::read_as<smb::Transfer>(body));  // no other request has a payload
  return writing_.at;
}

void StreamConnection::frame(const smb::Header& header, std::span<const std::byte> body,
                             Descriptor /*descriptor*/) {
  switch (header.opcode) {
    case smb::Opcode::kJoin:
      join(smb::read_as<smb::Join>(body));
      break;
    case smb::Opcode::kRead:
      read(smb::read_as<smb::Transfer>(body));
      break;
    case smb::Opcode::kWrite:
      if (header.payload_bytes == 0) begin_write(smb::read_as<smb::Transfer>(body));
      end_write();
      break;
    default:
      submit(body);
  }
  served_ += sizeof(header) + body.size() + header.payload_bytes;
  if (served_ >= context_.quantum || !readable()) stream_->pause();
}

void StreamConnection::join(const smb::Join& join) {
  Handshake::Admission admission = handshake_.join(join);
  context_.pending.leave(*this);
  if (!admission.session) return reject(admission.status, admission.cause);
  session_ = std::move(admission.session);
  stream_->queue(reply_to(request_, smb::Status::kOk), bytes_of(admission.joined));
  if (!admission.seal) return;
  send();
  stream_->seal(admission.seal->to_client, admission.seal->to_box);
}

void StreamConnection::read(const smb::Transfer& transfer) {
  if (transfer.bytes > smb::kMaxPayload) malformed("it asks for more than a payload holds");
  Access access = context_.handler.access(session_, transfer, false);
  if (access.status != smb::Status::kOk) return refuse(request_, access.status, access.cause);
  stream_->queue(reply_to(request_, smb::Status::kOk), {}, {access.at, transfer.bytes},
                 std::move(access.segment));
  served_ += transfer.bytes;
}

void StreamConnection::begin_write(const smb::Transfer& transfer) {
  if (transfer.bytes != request_.payload_bytes) malformed("its payload has another size");
  writing_ = context_.handler.access(session_, transfer, true);
  if (writing_.status != smb::Status::kOk) writing_.at = nullptr;
}

void StreamConnection::end_write() {
  const Access written = std::exchange(writing_, {});
  if (written.status != smb::Status::kOk) return refuse(request_, written.status, written.cause);
  stream_->queue(reply_to(request_, smb::Status::kOk), {});
}

void StreamConnection::submit(std::span<const std::byte> body) {
  ++unanswered_;
  context_.handler.submit(session_, request_.opcode, body,
                          [self = shared_from_this(), request = request_](Reply reply) {
                            self->answered(request, std::move(reply));
                          });
}

void StreamConnection::reply(const smb::Header& request, Reply&& reply) {
  --unanswered_;
  Descriptor descriptor = grant(reply);
  if (reply.status != smb::Status::kOk) return refuse(request, reply.status, reply.cause);
  const auto payload = std::make_shared<const std::vector<std::byte>>(std::move(reply.payload));
  stream_->queue(reply_to(request, smb::Status::kOk), reply.body, *payload, payload,
                 std::move(descriptor));
}

// The segment's descriptor on a Unix socket. If there is none, the reply says why.
Descriptor StreamConnection::grant(Reply& reply) const {
  if (!reply.granted || reply.status != smb::Status::kOk ||
      transport_ != smb::TransportKind::kShm) {
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
  reply.status = smb::Status::kInternal;
  log::error(reply.cause);
  return {};
}

void StreamConnection::refuse(const smb::Header& request, smb::Status status,
                              const std::string& cause) {
  const auto text = std::make_shared<const std::string>(
      cause.empty() ? std::string(smb::status_name(status)) : cause);
  stream_->queue(reply_to(request, status), {}, std::as_bytes(smb::sent_cause(*text)), text);
}

void StreamConnection::reject(smb::Status status, const std::string& cause) {
  context_.refusals.warn("closed the connection of " + smb::peer_name(fd_) + ": " + cause);
  // A reply to something that is no request is about the connection: a second Hello.
  if (*smb::opcode_name(request_.opcode) == '\0') request_.opcode = smb::Opcode::kHello;
  refuse(request_, status, cause);
  send();
  over_ = true;
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
