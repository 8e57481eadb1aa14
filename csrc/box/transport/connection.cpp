#include "box/transport/connection.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "base/tcp.h"
#include "box/transport/tuning.h"

namespace hbm::box::transport {
namespace {

using protocol::FrameStream;
using protocol::Header;
using protocol::Opcode;
using protocol::Status;

}  // namespace

Connection::Connection(std::unique_ptr<FrameStream> stream, std::string box, Requester& requester)
    : stream_(std::move(stream)),
      box_(std::move(box)),
      requester_(requester),
      round_trip_(least_round_trip(stream_->fd())) {}

uint64_t Connection::link_bytes() const noexcept {
  return static_cast<uint64_t>(2 * round_trip_.count() * highest_rate_);
}

void Connection::measure_rate(uint64_t bytes) noexcept {
  moved_bytes_ += bytes;
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::duration<double> time = now - measured_since_;
  if (time < round_trip_) return;
  highest_rate_ = std::max(highest_rate_, static_cast<double>(moved_bytes_) / time.count());
  measured_since_ = now;
  moved_bytes_ = 0;
}

void Connection::queue(Opcode opcode, std::variant<TransportRequest*, Slice> of,
                       std::span<const std::byte> body, std::span<const std::byte> payload) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(sent_.size()));
    sent_.emplace_back();
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  Header header;
  header.opcode = opcode;
  header.id = ++turn_ << 32 | index;
  stream_->queue(header, body, payload);
  asked_ += sizeof(header) + body.size() + payload.size();
  sent_[index] = {header.id, opcode, asked_, std::move(of)};
  ++unanswered_;
}

Connection::Sent* Connection::find(uint64_t id) noexcept {
  const uint64_t index = id & UINT32_MAX;
  if (id == 0 || index >= sent_.size() || sent_[index].id != id) return nullptr;
  return &sent_[index];
}

void Connection::send(TransportRequest& request) {
  queue(request.opcode, &request, request.body, {});
}

void Connection::send(const Slice& slice) {
  const std::span<const std::byte> data(slice.local, slice.transfer.bytes);
  if (is_distant() && moving_bytes_ == 0) {
    measured_since_ = std::chrono::steady_clock::now();
    moved_bytes_ = 0;
  }
  moving_bytes_ += data.size();
  queue(slice.opcode, slice, std::as_bytes(std::span(&slice.transfer, 1)),
        slice.opcode == Opcode::kWrite ? data : data.first(0));
}

void Connection::flush() {
  if (stream_->flush() == FrameStream::Flow::kClosed) closed();
}

bool Connection::receive() {
  const FrameStream::Flow flow = stream_->receive(*this, kReceivedBytesPerTurn);
  if (flow == FrameStream::Flow::kClosed) closed();
  return flow == FrameStream::Flow::kMore;
}

short Connection::events() const noexcept {
  return static_cast<short>(stream_->queued_bytes() > 0 ? POLLIN | POLLOUT : POLLIN);
}

const char* Connection::check(const Header& header) {
  if (const char* cause = malformed_reply(header)) return cause;
  if (header.opcode == Opcode::kHello && header.status != Status::kOk) return nullptr;
  const Sent* const sent = find(header.id);
  if (sent == nullptr) return "it replies to no request";
  if (header.opcode != sent->opcode) return "it has another opcode than its request";
  if (sent->end > asked_ - stream_->queued_bytes())
    return "it replies to a request that was not fully sent";
  if (header.status != Status::kOk) return nullptr;
  if (header.body_bytes != protocol::reply_body_bytes(header.opcode))
    return "its body has another size";
  uint32_t payload = 0;
  if (header.opcode == Opcode::kStats) payload = header.payload_bytes;  // any size
  if (header.opcode == Opcode::kRead) payload = std::get<Slice>(sent->of).transfer.bytes;
  return header.payload_bytes == payload ? nullptr : "its payload has another size";
}

std::byte* Connection::payload_destination(const Header& header, std::span<const std::byte>) {
  if (header.status != Status::kOk) {
    cause_.resize(header.payload_bytes);
    return reinterpret_cast<std::byte*>(cause_.data());
  }
  Sent& sent = *find(header.id);
  if (Slice* const slice = std::get_if<Slice>(&sent.of)) return slice->local;
  std::vector<std::byte>& payload = std::get<TransportRequest*>(sent.of)->payload;
  payload.resize(header.payload_bytes);
  return payload.data();
}

void Connection::frame(const Header& header, std::span<const std::byte> body,
                       Descriptor descriptor) {
  if (header.opcode == Opcode::kHello) {
    throw Error(ErrorKind::kNetwork,
                "the memory box at " + box_ + " ended the connection: " + cause_);
  }
  Sent sent = std::exchange(*find(header.id), {});
  free_.push_back(static_cast<uint32_t>(header.id & UINT32_MAX));
  --unanswered_;
  std::string cause = std::exchange(cause_, {});
  if (Slice* const slice = std::get_if<Slice>(&sent.of)) {
    moving_bytes_ -= slice->transfer.bytes;
    if (is_distant()) measure_rate(slice->transfer.bytes);
    requester_.answered(*slice, header.status, cause);
    return;
  }
  TransportRequest& request = *std::get<TransportRequest*>(sent.of);
  request.status = header.status;
  request.cause = std::move(cause);
  request.reply.assign(body.begin(), body.end());
  requester_.answered(request, std::move(descriptor));
}

void Connection::closed() const {
  throw Error(ErrorKind::kNetwork, "the memory box at " + box_ + " closed the connection");
}

}  // namespace hbm::box::transport
