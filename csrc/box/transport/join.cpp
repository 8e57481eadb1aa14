#include "box/transport/join.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>

#include "box/protocol/proof.h"

namespace hbm::transport {
namespace {

using smb::FrameStream;
using smb::Header;
using smb::Opcode;
using smb::Status;

// One frame of a struct, or of an error's words.
template <smb::Body T>
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

  std::byte* place(const Header& header, std::span<const std::byte>) override {
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
    throw Refused(status_, words_.empty() ? smb::status_name(status_) : words_);
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

template <smb::Body T>
T receive(FrameStream& stream, const std::string& box, Opcode opcode, smb::Deadline deadline) {
  Expected<T> expected(stream, opcode);
  for (;;) {
    const FrameStream::Flow flow = stream.receive(expected, smb::kMaxPayload);
    if (expected.arrived()) return expected.value();
    const std::string what = std::string("its ") + opcode_name(opcode);
    if (flow == FrameStream::Flow::kClosed) {
      failed(box, "it closed the connection before " + what + " came; its log may say why");
    }
    if (flow == FrameStream::Flow::kIdle && !smb::wait_for(stream.fd(), POLLIN, deadline)) {
      failed(box, what + " did not come in time; is it a memory box, and does it still run?");
    }
  }
}

void send(FrameStream& stream, const std::string& box, const smb::Join& join,
          smb::Deadline deadline) {
  Header header;
  header.opcode = Opcode::kJoin;
  stream.queue(header, std::as_bytes(std::span(&join, 1)));
  for (;;) {
    const FrameStream::Flow flow = stream.flush();
    if (flow == FrameStream::Flow::kIdle) return;
    if (flow == FrameStream::Flow::kClosed) failed(box, "it closed the connection");
    if (!smb::wait_for(stream.fd(), POLLOUT, deadline)) failed(box, "it takes no data");
  }
}

bool ends_with_zero(std::span<const char> text) {
  return std::find(text.begin(), text.end(), '\0') != text.end();
}

}  // namespace

smb::Join sealed_join(const TransportOptions& opening) {
  smb::Join join = opening.join;
  if (opening.seal && !opening.token.empty()) join.flags |= smb::Join::kSealed;
  return join;
}

smb::Joined join_box(FrameStream& stream, const std::string& box, const smb::Join& request,
                     const std::string& token, smb::Deadline deadline) {
  const auto hello = receive<smb::Hello>(stream, box, Opcode::kHello, deadline);
  if (hello.token_required != 0 && token.empty()) {
    throw Refused(Status::kDenied, "the memory box at " + box +
                                       " asks for a token and none was given; give the "
                                       "client the token that the box was started with");
  }
  if (hello.token_required == 0 && !token.empty()) {
    failed(box, "it runs without a token, so it cannot prove that it knows the one that was given");
  }
  const bool seals = (request.flags & smb::Join::kSealed) != 0;
  if (seals != (hello.sealed != 0)) throw Refused(Status::kUnsupported, smb::seal_mismatch(seals));
  smb::Join join = request;
  join.nonce = smb::random_nonce();
  join.pid = static_cast<uint32_t>(getpid());
  join.proof = smb::client_proof(token, hello, join);
  send(stream, box, join, deadline);

  const auto joined = receive<smb::Joined>(stream, box, Opcode::kJoin, deadline);
  if (!smb::equal(joined.proof, smb::server_proof(token, hello, join, joined))) {
    failed(box, "it does not know the token; somebody else answers at this address");
  }
  if (join.session && joined.session != join.session) {
    failed(box, "it answered for another session than the one asked for");
  }
  if (!ends_with_zero(joined.boot_id) || !ends_with_zero(joined.socket_path)) {
    failed(box, "its names have no end");
  }
  if (seals) {
    const smb::SealKeys keys = smb::seal_keys(token, hello, join);
    stream.seal(keys.to_box, keys.to_client);
  }
  return joined;
}

}  // namespace hbm::transport
