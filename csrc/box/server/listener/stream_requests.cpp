// The requests of a stream connection, and the replies to them.
#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "box/protocol/socket.h"
#include "box/server/listener/stream_connection.h"
#include "box/server/storage/segment.h"

namespace hbm::box {
namespace {

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

}  // namespace hbm::box
