#include "box/protocol/frame_input.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"
#include "box/protocol/tuning.h"

namespace hbm::box::protocol {
namespace {

constexpr uint64_t kHead = sizeof(Header) + kMaxBody;
constexpr uint64_t kRecordBuffer =
    kHead + sizeof(RecordHeader) + kMostRecordBytes + sizeof(Tag) +
    sizeof(RecordHeader);  // a left-over head, a record, and the next header

[[noreturn]] void failed(const std::string& what) { throw Error(ErrorKind::kNetwork, what); }

// Returns the bytes received; 0: the peer has closed; negative: nothing has arrived.
ssize_t receive_some(int socket, msghdr& message) {
  ssize_t got = 0;
  do {
    got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got >= 0 || errno == EAGAIN || errno == EWOULDBLOCK) return got;
  if (errno == ECONNRESET) return 0;
  failed(std::string("the connection failed: ") + std::strerror(errno));
}

}  // namespace

FrameInput::Received FrameInput::receive(int socket, FrameReceiver& receiver, uint64_t most,
                                         const bool& paused) {
  uint64_t received = 0;
  bool drained = false;
  for (;;) {
    while (take_frame(receiver)) {
      if (paused) return Received::kMore;
    }
    if (verify_record()) continue;
    if (drained) return Received::kIdle;
    if (received >= most) return Received::kMore;
    const Filled filled = authenticator_ ? fill_records(socket) : fill(socket);
    if (filled.received != Received::kMore) return filled.received;
    received += filled.bytes;
    drained = filled.drained;
  }
}

bool FrameInput::take_frame(FrameReceiver& receiver) {
  if (!in_payload_ && !take_head(receiver)) return false;
  consume_payload();
  if (payload_left_ > 0) return false;
  in_payload_ = checked_ = false;
  receiver.frame(header_, {body_.data(), header_.body_bytes}, take_descriptor());
  return true;
}

bool FrameInput::take_head(FrameReceiver& receiver) {
  if (!checked_) {
    if (buffered() < sizeof(Header)) return false;
    std::memcpy(&header_, buffer_.get() + begin_, sizeof(Header));
    if (header_.magic == kMagic && header_.version != kVersion) {
      failed("a frame is malformed: it is of version " + std::to_string(header_.version) +
             " of the memory box's protocol, and this end speaks version " +
             std::to_string(kVersion) + "; run the same release of torch_hbmcomm on both ends");
    }
    if (const char* cause = receiver.check(header_)) {
      failed(std::string("a frame is malformed: ") + cause);
    }
    if (header_.body_bytes > kMaxBody) failed("a frame is malformed: its body is too long");
    checked_ = true;
  }
  if (buffered() < sizeof(Header) + header_.body_bytes) return false;
  consume(nullptr, sizeof(Header));
  consume(body_.data(), header_.body_bytes);
  payload_left_ = header_.payload_bytes;
  destination_ = nullptr;
  if (payload_left_ > 0) {
    destination_ = receiver.payload_destination(header_, {body_.data(), header_.body_bytes});
  }
  in_payload_ = true;
  return true;
}

void FrameInput::consume(std::byte* to, uint64_t bytes) {
  if (to != nullptr && bytes > 0) std::memcpy(to, buffer_.get() + begin_, bytes);
  begin_ += bytes;
  consumed_ += bytes;
}

void FrameInput::consume_payload() {
  uint64_t here = std::min(payload_left_, buffered());
  if (shared_ && destination_ != nullptr) {
    here = uncut_bytes(destination_, here, payload_left_);
    store_elements(destination_, buffer_.get() + begin_, here);
    consume(nullptr, here);
  } else {
    consume(destination_, here);
  }
  payload_left_ -= here;
  if (destination_ != nullptr) destination_ += here;
}

Descriptor FrameInput::take_descriptor() {
  if (descriptors_.empty() || descriptors_.front().last_byte >= consumed_) return {};
  Descriptor taken = std::move(descriptors_.front().descriptor);
  descriptors_.pop_front();
  if (!descriptors_.empty() && descriptors_.front().last_byte < consumed_) {
    failed("a frame is malformed: several descriptors came with it");
  }
  return taken;
}

FrameInput::Filled FrameInput::fill(int socket) {
  const uint64_t size = shared_ ? kSharedReceiveBufferBytes : kReceiveBufferBytes;
  if (!buffer_) buffer_ = std::make_unique_for_overwrite<std::byte[]>(size);
  if (begin_ > 0) std::memmove(buffer_.get(), buffer_.get() + begin_, buffered());
  end_ -= begin_;
  begin_ = 0;

  const bool direct = !shared_ && payload_left_ > 0 && destination_ != nullptr;
  const bool reading_past = payload_left_ > 0 && destination_ == nullptr;
  // After a bulky frame another bulky frame is likely. Only its head should be received into the
  // buffer, because its payload should not pass through the buffer.
  const bool bulky = !shared_ && header_.payload_bytes > kBulkBytes && !reading_past;
  std::array<iovec, 2> parts;
  size_t count = 0;
  if (direct) parts[count++] = {destination_, payload_left_};
  parts[count++] = {buffer_.get() + end_, (bulky ? kHead : size) - end_};

  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control;
  if (passes_descriptors_) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_LEN(sizeof(int));  // CMSG_SPACE has room for two
  }
  const ssize_t got = receive_some(socket, message);
  if (got <= 0) return {got == 0 ? Received::kClosed : Received::kIdle, 0, true};
  const auto bytes = static_cast<uint64_t>(got);
  const uint64_t asked = (direct ? payload_left_ : 0) + parts[count - 1].iov_len;
  if (passes_descriptors_) {
    const uint64_t behind = consumed_ + buffered() + bytes;
    keep_descriptor(message, behind - 1);
  }
  const uint64_t placed = direct ? std::min(payload_left_, bytes) : 0;
  if (direct) destination_ += placed;
  payload_left_ -= placed;
  consumed_ += placed;
  end_ += bytes - placed;
  // Within a bulky payload more data arrive before poll() could report them.
  const bool more_soon = payload_left_ > buffered() && bytes >= kBulkBytes;
  return {Received::kMore, bytes, bytes < asked && !more_soon};
}

void FrameInput::authenticate(const MacKey& key) {
  auto larger = std::make_unique_for_overwrite<std::byte[]>(kRecordBuffer);
  arrived_end_ = buffered();
  if (arrived_end_ > 0) std::memcpy(larger.get(), buffer_.get() + begin_, arrived_end_);
  buffer_ = std::move(larger);
  begin_ = end_ = next_record_ = 0;
  authenticator_.emplace(key);
}

uint64_t FrameInput::record_bytes() const {
  RecordHeader header;
  std::memcpy(&header, buffer_.get() + next_record_, sizeof(header));
  if (header.bytes > kMostRecordBytes) throw Forged("a record is longer than the protocol allows");
  return sizeof(header) + header.bytes + sizeof(Tag);
}

bool FrameInput::verify_record() {
  const uint64_t arrived = arrived_end_ - next_record_;
  if (!authenticator_ || arrived < sizeof(RecordHeader) || arrived < record_bytes()) return false;
  std::byte* const record = buffer_.get() + next_record_;
  const uint64_t untagged = authenticator_->verify({record, record_bytes()}).size();
  // Move the unconsumed rest of the previous record (part of a head or of an element) directly
  // before the content of this record.
  const uint64_t left = buffered();
  std::memmove(record + sizeof(RecordHeader) - left, buffer_.get() + begin_, left);
  begin_ = next_record_ + sizeof(RecordHeader) - left;
  end_ = next_record_ + untagged;
  next_record_ = end_ + sizeof(Tag);
  return true;
}

FrameInput::Filled FrameInput::fill_records(int socket) {
  make_room();
  const uint64_t before = arrived_end_ - next_record_;
  const bool record_begun = before >= sizeof(RecordHeader);
  uint64_t asked = kRecordBuffer - arrived_end_;
  // After a long record another one is likely. Receive only its header now, because make_room()
  // moves each byte of it that is in the buffer.
  if (record_begun && record_bytes() >= kBulkBytes)
    asked = record_bytes() - before + sizeof(RecordHeader);
  iovec part{buffer_.get() + arrived_end_, asked};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  const ssize_t got = receive_some(socket, message);
  if (got <= 0) return {got == 0 ? Received::kClosed : Received::kIdle, 0, true};
  const auto bytes = static_cast<uint64_t>(got);
  arrived_end_ += bytes;
  const bool more_soon = bytes >= kBulkBytes && before + bytes < record_bytes();
  return {Received::kMore, bytes, bytes < asked && !more_soon};
}

// Moves the unconsumed verified bytes to the front, then the unverified bytes.
void FrameInput::make_room() {
  const uint64_t left = buffered();
  const uint64_t unopened = arrived_end_ - next_record_;
  if (begin_ > 0) std::memmove(buffer_.get(), buffer_.get() + begin_, left);
  if (next_record_ > left) {
    std::memmove(buffer_.get() + left, buffer_.get() + next_record_, unopened);
  }
  begin_ = 0;
  end_ = next_record_ = left;
  arrived_end_ = left + unopened;
}

void FrameInput::keep_descriptor(msghdr& message, uint64_t last_byte) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(part), sizeof(int));
    descriptors_.push_back({last_byte, Descriptor(descriptor)});
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    failed(
        "a descriptor could not be taken: this process has too many open files (ulimit -n), or "
        "several were passed together");
  }
  // Before the system call, the buffer had at most one incomplete frame, with one descriptor. The
  // call passed at most one more.
  if (descriptors_.size() > 2) failed("a frame is malformed: several descriptors came with it");
}

}  // namespace hbm::box::protocol
