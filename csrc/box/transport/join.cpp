#include "box/transport/join.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>

#include "box/protocol/proof.h"

namespace hbm::box::transport {
namespace {

using protocol::FrameStream;
using protocol::Header;
using protocol::Opcode;
using protocol::Status;

// Receives one frame: a struct, or the text of a refusal.
template <protocol::Body T>
class Expected final : public FrameStream::Receiver {
 public:
  explicit Expected(FrameStream& stream, Opcode opcode) : stream_(stream), opcode_(opcode) {}

  const char* check(const Header& header) override {
    if (const char* cause = malformed_reply(header)) return cause;
    if (header.opcode != opcode_) return "it is another one than expected of a box";
    if (header.status != Status::kOk) return header.body_bytes == 0 ? nullptr : "it has a body";
    if (header.body_bytes != sizeof(T)) return "its body has another size";
    return header.payload_bytes == 0 ? nullptr : "it has a payload";
  }

  std::byte* payload_destination(const Header& header, std::span<const std::byte>) override {
    words_.resize(header.payload_bytes);
    return reinterpret_cast<std::byte*>(words_.data());
  }

  void frame(const Header& header, std::span<const std::byte> body, Descriptor) override {
    status_ = header.status;
    if (header.status == Status::kOk) std::memcpy(&value_.emplace(), body.data(), sizeof(T));
    arrived_ = true;
    stream_.pause();
  }

  bool arrived() const { return arrived_; }

  T value() const {
    if (value_) return *value_;
    throw Refused(status_, words_.empty() ? protocol::status_name(status_) : words_);
  }

 private:
  FrameStream& stream_;
  const Opcode opcode_;
  bool arrived_ = false;
  Status status_{};
  std::optional<T> value_;
  std::string words_;
};

[[noreturn]] void failed(const std::string& box, const std::string& what) {
  throw Error(ErrorKind::kNetwork, "cannot join the memory box at " + box + ": " + what);
}

template <protocol::Body T>
T receive(FrameStream& stream, const std::string& box, Opcode opcode, protocol::Deadline deadline) {
  Expected<T> expected(stream, opcode);
  for (;;) {
    const FrameStream::Flow flow = stream.receive(expected, protocol::kMaxPayload);
    if (expected.arrived()) return expected.value();
    const std::string what = std::string("its ") + opcode_name(opcode);
    if (flow == FrameStream::Flow::kClosed) {
      failed(box, "it closed the connection before " + what + " came; its log may say why");
    }
    if (flow == FrameStream::Flow::kIdle && !protocol::wait_for(stream.fd(), POLLIN, deadline)) {
      failed(box, what + " did not come in time; is it a memory box, and does it still run?");
    }
  }
}

void send(FrameStream& stream, const std::string& box, const protocol::Join& join,
          protocol::Deadline deadline) {
  Header header;
  header.opcode = Opcode::kJoin;
  stream.queue(header, std::as_bytes(std::span(&join, 1)));
  for (;;) {
    const FrameStream::Flow flow = stream.flush();
    if (flow == FrameStream::Flow::kIdle) return;
    if (flow == FrameStream::Flow::kClosed) failed(box, "it closed the connection");
    if (!protocol::wait_for(stream.fd(), POLLOUT, deadline)) failed(box, "it takes no data");
  }
}

bool ends_with_zero(std::span<const char> text) {
  return std::find(text.begin(), text.end(), '\0') != text.end();
}

}  // namespace

protocol::Join authenticated_join(const TransportOptions& opening) {
  protocol::Join join = opening.join;
  if (opening.seal && !opening.token.empty()) join.flags |= protocol::Join::kAuthenticated;
  return join;
}

protocol::Joined join_box(FrameStream& stream, const std::string& box,
                          const protocol::Join& request, const std::string& token,
                          protocol::Deadline deadline) {
  const auto hello = receive<protocol::Hello>(stream, box, Opcode::kHello, deadline);
  if (hello.token_required != 0 && token.empty()) {
    throw Refused(Status::kDenied, "the memory box at " + box +
                                       " asks for a token and none was given; give the "
                                       "client the token that the box was started with");
  }
  if (hello.token_required == 0 && !token.empty()) {
    failed(box, "it runs without a token, so it cannot prove that it knows the one that was given");
  }
  const bool authenticates = (request.flags & protocol::Join::kAuthenticated) != 0;
  if (authenticates != (hello.authenticated != 0))
    throw Refused(Status::kUnsupported, protocol::authentication_mismatch(authenticates));
  protocol::Join join = request;
  join.nonce = protocol::random_nonce();
  join.pid = static_cast<uint32_t>(getpid());
  join.proof = protocol::client_proof(token, hello, join);
  send(stream, box, join, deadline);

  const auto joined = receive<protocol::Joined>(stream, box, Opcode::kJoin, deadline);
  if (!protocol::equal(joined.proof, protocol::server_proof(token, hello, join, joined))) {
    failed(box, "it does not know the token; another process answers at this address");
  }
  if (join.session && joined.session != join.session) {
    failed(box, "it answered for another session than the one asked for");
  }
  if (!ends_with_zero(joined.boot_id) || !ends_with_zero(joined.socket_path)) {
    failed(box, "its answer is malformed: a name in it has no end");
  }
  if (authenticates) {
    const protocol::MacKeys keys = protocol::mac_keys(token, hello, join);
    stream.authenticate(keys.to_box, keys.to_client);
  }
  return joined;
}

}  // namespace hbm::box::transport
