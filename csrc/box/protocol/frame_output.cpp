#include "box/protocol/frame_output.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"
#include "box/protocol/tuning.h"

namespace hbm::box::protocol {

// The parts of one sendmsg() call.
class FrameOutput::Gathering {
 public:
  bool full() const noexcept { return count_ + 2 > kPartsPerSend; }  // a frame has two parts
  uint64_t bytes() const noexcept { return bytes_; }

  // Adds `part` without its first `skipped` bytes. Subtracts the bytes left out from `skipped`.
  void add(std::span<const std::byte> part, uint64_t& skipped) noexcept {
    const uint64_t skip = std::min<uint64_t>(skipped, part.size());
    skipped -= skip;
    if (skip == part.size()) return;
    parts_[count_++] = {const_cast<std::byte*>(part.data()) + skip, part.size() - skip};
    bytes_ += part.size() - skip;
  }

  ssize_t send(int socket, int descriptor) noexcept {
    msghdr message{};
    message.msg_iov = parts_.data();
    message.msg_iovlen = count_;
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
    if (descriptor >= 0) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* const passed = CMSG_FIRSTHDR(&message);
      passed->cmsg_level = SOL_SOCKET;
      passed->cmsg_type = SCM_RIGHTS;
      passed->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(passed), &descriptor, sizeof(int));
    }
    ssize_t sent = 0;
    do {
      sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent;
  }

 private:
  std::array<iovec, kPartsPerSend> parts_;
  size_t count_ = 0;
  uint64_t bytes_ = 0;
};

void FrameOutput::queue(Header header, std::span<const std::byte> body,
                        std::span<const std::byte> payload, std::shared_ptr<const void> hold,
                        Descriptor descriptor) {
  header.body_bytes = static_cast<uint32_t>(body.size());
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  QueuedFrame& frame = frames_.emplace_back();
  std::memcpy(frame.head.data(), &header, sizeof(header));
  if (!body.empty()) std::memcpy(frame.head.data() + sizeof(header), body.data(), body.size());
  frame.head_bytes = sizeof(header) + body.size();
  frame.payload = payload;
  frame.hold = std::move(hold);
  frame.descriptor = std::move(descriptor);
  bytes_ += frame.bytes();
}

FrameOutput::Flushed FrameOutput::flush(int socket) {
  while (bytes_ > 0) {
    Gathering gathering;
    const int passed = gather(gathering);
    const ssize_t sent = gathering.send(socket, passed);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return Flushed::kBlocked;
      if (errno == EPIPE || errno == ECONNRESET) return Flushed::kClosed;
      throw Error(ErrorKind::kNetwork,
                  std::string("the connection failed while sending: ") + std::strerror(errno));
    }
    drop(static_cast<uint64_t>(sent));
    if (static_cast<uint64_t>(sent) < gathering.bytes()) return Flushed::kBlocked;
  }
  return Flushed::kSent;
}

int FrameOutput::gather(Gathering& gathering) {
  uint64_t skipped = 0;
  if (copies()) {
    if (copied_.empty()) copy();
    gathering.add(copied_, skipped);
    return passed_.get();
  }
  skipped = first_sent_;
  const int passed = skipped == 0 ? frames_.front().descriptor.get() : -1;
  for (const QueuedFrame& frame : frames_) {
    const bool first = &frame == &frames_.front();
    if (gathering.full() || (!first && (passed >= 0 || frame.descriptor))) break;
    gathering.add({frame.head.data(), frame.head_bytes}, skipped);
    gathering.add(frame.payload, skipped);
  }
  return passed;
}

void FrameOutput::copy() {
  constexpr uint64_t kMost = sizeof(RecordHeader) + kMostRecordBytes + sizeof(Tag);
  if (!buffer_) buffer_ = std::make_unique_for_overwrite<std::byte[]>(kMost);
  std::byte* const record = buffer_.get();
  std::byte* const content = record + sizeof(RecordHeader);
  copied_bytes_ = copy_frames(content);
  copied_ = {content, copied_bytes_};
  if (!authenticator_) return;
  const RecordHeader header{static_cast<uint32_t>(copied_bytes_)};
  std::memcpy(record, &header, sizeof(header));
  const Tag tag = authenticator_->next_tag({record, sizeof(header) + copied_bytes_});
  std::memcpy(content + copied_bytes_, tag.data(), sizeof(tag));
  copied_ = {record, sizeof(header) + copied_bytes_ + sizeof(tag)};
}

uint64_t FrameOutput::copy_frames(std::byte* to) {
  uint64_t end = 0;
  while (!frames_.empty()) {
    QueuedFrame& frame = frames_.front();
    if (first_sent_ == 0) {
      if (end > 0 && (passed_ || frame.descriptor)) break;
      if (kMostRecordBytes - end < frame.head_bytes) break;
      std::memcpy(to + end, frame.head.data(), frame.head_bytes);
      passed_ = std::move(frame.descriptor);
      first_sent_ = frame.head_bytes;
      end += frame.head_bytes;
    }
    const auto rest = frame.payload.subspan(first_sent_ - frame.head_bytes);
    const uint64_t here = std::min<uint64_t>(rest.size(), kMostRecordBytes - end);
    const uint64_t bytes = uncut_bytes(rest.data(), here, rest.size());
    load_elements(to + end, rest.data(), bytes);
    first_sent_ += bytes;
    end += bytes;
    if (bytes < rest.size()) break;
    frames_.pop_front();
    first_sent_ = 0;
  }
  return end;
}

void FrameOutput::drop(uint64_t sent) {
  if (copies()) {
    copied_ = copied_.subspan(sent);
    passed_ = Descriptor();
    if (copied_.empty()) bytes_ -= copied_bytes_;
    return;
  }
  bytes_ -= sent;
  first_sent_ += sent;
  while (!frames_.empty() && first_sent_ >= frames_.front().bytes()) {
    first_sent_ -= frames_.front().bytes();
    frames_.pop_front();
  }
}

}  // namespace hbm::box::protocol
