// A joined connection over a stream socket: sends requests, and matches replies to them by their
// ids.
//
// Threads: one at a time. After an Error the connection must not be used.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/descriptor.h"
#include "base/tuning.h"
#include "box/protocol/frame_stream.h"
#include "box/transport/slices.h"
#include "box/transport/transport.h"
#include "box/transport/tuning.h"

namespace hbm::box::transport {

class Connection final : private protocol::FrameStream::Receiver {
 public:
  // Receives the replies.
  class Requester {
   public:
    // Called for the reply to `request`. Status, cause, reply and payload of `request` are set, but
    // `done` is not. `descriptor` was passed with the reply, or is none.
    virtual void answered(TransportRequest& request, Descriptor descriptor) = 0;
    virtual void answered(const Slice& slice, protocol::Status status,
                          const std::string& cause) = 0;

   protected:
    ~Requester() = default;
  };

  // `box`: the name of the box, for the texts of errors. REQUIRES: `requester` outlives the
  // connection.
  Connection(std::unique_ptr<protocol::FrameStream> stream, std::string box, Requester& requester);

  int fd() const noexcept { return stream_->fd(); }

  // Queue a request; flush() sends it.
  void send(TransportRequest& request);  // control
  void send(const Slice& slice);

  uint64_t unanswered() const noexcept { return unanswered_; }      // requests
  uint64_t moving_bytes() const noexcept { return moving_bytes_; }  // bytes of unanswered slices
  uint64_t queued_bytes() const noexcept { return stream_->queued_bytes(); }
  // Returns how many bytes in flight keep the link busy: twice its round-trip time multiplied by
  // the highest rate so far. With fewer bytes in flight than that, the value grows with each round
  // trip. 0: the link has no delay.
  uint64_t link_bytes() const noexcept;

  // flush() and receive() throw Error(kNetwork) when the box closes the connection or breaks the
  // protocol.
  void flush();    // sends until all is sent or the socket is full
  bool receive();  // receives a bounded number of bytes; true: call again without polling

  // Returns the events for poll().
  short events() const noexcept;

 private:
  struct Sent {
    uint64_t id = 0;  // 0: free
    protocol::Opcode opcode{};
    uint64_t end = 0;  // bytes queued on this connection, up to the end of this frame
    std::variant<TransportRequest*, Slice> of;
  };

  const char* check(const protocol::Header& header) override;
  std::byte* payload_destination(const protocol::Header& header,
                                 std::span<const std::byte> body) override;
  void frame(const protocol::Header& header, std::span<const std::byte> body,
             Descriptor descriptor) override;

  bool is_distant() const noexcept { return round_trip_ >= kDistantRoundTrip; }
  void measure_rate(uint64_t bytes) noexcept;
  void queue(protocol::Opcode opcode, std::variant<TransportRequest*, Slice> of,
             std::span<const std::byte> body, std::span<const std::byte> payload);
  Sent* find(uint64_t id) noexcept;
  [[noreturn]] void closed() const;

  const std::unique_ptr<protocol::FrameStream> stream_;
  const std::string box_;
  Requester& requester_;
  std::vector<Sent> sent_;  // the lower half of an id is an index here
  std::vector<uint32_t> free_;
  uint64_t turn_ = 0;   // upper half of the last id
  uint64_t asked_ = 0;  // bytes queued since the beginning
  uint64_t unanswered_ = 0;
  uint64_t moving_bytes_ = 0;
  const std::chrono::duration<double> round_trip_;
  // The bytes of slices since measured_since_. The link was busy all this time.
  uint64_t moved_bytes_ = 0;
  std::chrono::steady_clock::time_point measured_since_;
  double highest_rate_ = 0;  // bytes per second
  std::string cause_;        // of the reply that is being received
};

}  // namespace hbm::box::transport
