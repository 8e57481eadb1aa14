// The transport over RDMA: the queue pairs of a client, and its requests in flight.
//
// Control requests are messages on the first queue pair, in order (request_channel.h). Transfers
// are cut into slices (box/transport/slices.h); each is a one-sided RDMA READ or WRITE of the box's
// memory, on the queue pair with the fewest bytes in flight. A request on an idle transport is sent
// immediately. Otherwise the next progress() sends it together with others.
//
// The TCP connection of the join stays open without traffic. It breaks when the box ends, or its
// machine is gone.
//
// Threads: as Transport.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "box/protocol/frame_stream.h"
#include "box/protocol/wake_event.h"
#include "box/transport/slices.h"
#include "box/transport/transport.h"
#include "box/verbs/client/connector.h"
#include "box/verbs/client/local_buffers.h"
#include "box/verbs/client/queue_pair.h"
#include "box/verbs/client/remote_segment.h"
#include "box/verbs/client/request_channel.h"

namespace hbm::box::verbs::client {

class VerbsTransport final : public transport::Transport {
 public:
  // Connects the queue pairs. `joined`: the reply of the box on `stream`. Throws the errors of
  // transport::open_tcp().
  VerbsTransport(const transport::TransportOptions& opening, const protocol::Joined& joined,
                 std::unique_ptr<protocol::FrameStream> stream, protocol::Deadline deadline);

  protocol::TransportKind kind() const noexcept override { return protocol::TransportKind::kVerbs; }
  void post(transport::TransportRequest& request) override;
  void progress(std::chrono::nanoseconds most) override;
  void wake() noexcept override { wake_event_.signal(); }
  bool alive() const noexcept override { return alive_.load(std::memory_order_acquire); }
  int liveness_fd() const noexcept override { return stream_->fd(); }
  std::shared_ptr<void> register_memory(std::byte* memory, uint64_t bytes) override;

 private:
  void connect(const transport::TransportOptions& opening, const protocol::Id& session);
  ibv_qp_init_attr attributes(uint32_t receives) const;
  bool idle() const noexcept;
  void send();
  void send_slices();
  std::optional<size_t> least_busy() const noexcept;
  bool chain(size_t index, const transport::Slice& slice);
  bool refused_here(const transport::Slice& slice);

  bool poll();  // handles completions; true: a request has finished
  bool handle_completion(const ibv_wc& completion);
  bool finish(const Posted& posted, bool arrived);
  bool answered(transport::TransportRequest& request);
  void grant(transport::TransportRequest& request);
  bool sleep(std::chrono::nanoseconds most);  // true: wake() was called, or a request has finished
  [[noreturn]] void fail(const std::string& cause);
  void quit(const std::vector<Posted>& failed);

  const std::string box_;
  const std::unique_ptr<protocol::FrameStream> stream_;
  std::atomic<bool> alive_{true};
  std::string cause_;  // why the transport is not alive
  protocol::WakeEvent wake_event_;

  Connector connector_;
  common::CompletionChannel completion_channel_;
  common::CompletionQueue completions_;
  RequestChannel request_channel_;
  LocalBuffers local_buffers_;
  uint32_t inline_bytes_ = 0;
  std::vector<QueuePair> queue_pairs_;

  transport::Slices slices_;
  std::optional<transport::Slice> waiting_;  // taken from slices_, waits for a free buffer
  std::unordered_map<uint32_t, RemoteSegment> remote_segments_;  // by handle
};

}  // namespace hbm::box::verbs::client
