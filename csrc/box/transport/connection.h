// A joined connection over a stream socket, on which requests go out and replies are matched to
// them by their ids.
//
// Threads: one at a time. After an Error the connection is of no use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/descriptor.h"
#include "box/protocol/frame_stream.h"
#include "box/transport/slices.h"
#include "box/transport/transport.h"

namespace hbm::transport {

class Connection final : private smb::FrameStream::Receiver {
 public:
  // Takes the answers.
  class Requester {
   public:
    // `request` has its status, cause, reply and payload; it is not done yet. `descriptor` came
    // with the reply, or is none.
    virtual void answered(TransportRequest& request, Descriptor descriptor) = 0;
    virtual void answered(const Slice& slice, smb::Status status, const std::string& cause) = 0;

   protected:
    ~Requester() = default;
  };

  // `box` is its name in messages. REQUIRES: the requester outlives the connection.
  Connection(std::unique_ptr<smb::FrameStream> stream, std::string box, Requester& requester);

  int fd() const noexcept { return stream_->fd(); }

  // Queue a request; flush() sends it.
  void send(TransportRequest& request);  // control
  void send(const Slice& slice);

  uint64_t unanswered() const noexcept { return unanswered_; }      // requests
  uint64_t moving_bytes() const noexcept { return moving_bytes_; }  // of slices among them
  uint64_t queued_bytes() const noexcept { return stream_->queued_bytes(); }

  // Both throw Error(kNetwork) when the box closes the connection or breaks the protocol.
  void flush();    // sends what the kernel takes
  bool receive();  // takes in what is there; true: there may be more, also in the stream's buffer

  // The events that poll() shall wait for.
  short events() const noexcept;

 private:
  struct Sent {
    uint64_t id = 0;  // 0: free
    smb::Opcode opcode{};
    uint64_t end = 0;  // of it among all bytes sent
    std::variant<TransportRequest*, Slice> of;
  };

  const char* check(const smb::Header& header) override;
  std::byte* place(const smb::Header& header, std::span<const std::byte> body) override;
  void frame(const smb::Header& header, std::span<const std::byte> body,
             Descriptor descriptor) override;

  void queue(smb::Opcode opcode, std::variant<TransportRequest*, Slice> of,
             std::span<const std::byte> body, std::span<const std::byte> payload);
  Sent* find(uint64_t id) noexcept;
  [[noreturn]] void closed() const;

  const std::unique_ptr<smb::FrameStream> stream_;
  const std::string box_;
  Requester& requester_;
  std::vector<Sent> sent_;  // an id's lower half is a place here
  std::vector<uint32_t> free_;
  uint64_t turn_ = 0;   // upper half of the last id
  uint64_t asked_ = 0;  // bytes queued since the beginning
  uint64_t unanswered_ = 0;
  uint64_t moving_bytes_ = 0;
  std::string cause_;  // of the reply that is coming in
};

}  // namespace hbm::transport
