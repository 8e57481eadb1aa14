// The transport over RDMA: the queue pairs of a client, its lanes, and what is in flight on them.
//
// Control requests travel on lane 0 as messages, in order (request_channel.h). Transfers are cut in
// slices (box/transport/slices.h), each a one-sided RDMA READ or WRITE of the box's memory on the
// lane that has the least to do. What is posted while nothing is in flight goes out at once; else
// it waits for the next progress(), and goes out together with the rest.
//
// The TCP connection over which the client joined stays open and silent: it tells when the box, or
// its machine, is gone.
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
#include "box/verbs/client/remote_segment.h"
#include "box/verbs/client/request_channel.h"
#include "box/verbs/client/verbs_lane.h"

namespace hbm::verbs {

class VerbsTransport final : public transport::Transport {
 public:
  // Connects the lanes; `joined` is the box's answer on `stream`. Throws as transport::open_tcp.
  VerbsTransport(const transport::TransportOptions& opening, const smb::Joined& joined,
                 std::unique_ptr<smb::FrameStream> stream, smb::Deadline deadline);

  smb::TransportKind kind() const noexcept override { return smb::TransportKind::kVerbs; }
  void post(transport::TransportRequest& request) override;
  void progress(std::chrono::nanoseconds most) override;
  void wake() noexcept override { wake_event_.signal(); }
  bool alive() const noexcept override { return alive_.load(std::memory_order_acquire); }
  int liveness_fd() const noexcept override { return stream_->fd(); }
  std::shared_ptr<void> register_memory(std::byte* memory, uint64_t bytes) override;

 private:
  void connect(const transport::TransportOptions& opening, const smb::Id& session);
  ibv_qp_init_attr attributes(uint32_t receives) const;
  bool idle() const noexcept;
  void send();
  void send_slices();
  std::optional<size_t> least_busy() const noexcept;
  bool chain(size_t lane, const transport::Slice& slice);
  bool refused_here(const transport::Slice& slice);

  bool poll();  // takes completions in; true: a request finished
  bool take_in(const ibv_wc& completion);
  bool finish(const Posted& posted, bool arrived);
  bool answered(transport::TransportRequest& request);
  void grant(transport::TransportRequest& request);
  bool sleep(std::chrono::nanoseconds most);  // true: someone called wake()
  [[noreturn]] void fail(const std::string& cause);
  void quit(const std::vector<Posted>& failed);

  const std::string box_;
  const std::unique_ptr<smb::FrameStream> stream_;
  std::atomic<bool> alive_{true};
  std::string cause_;  // why it is not alive
  smb::WakeEvent wake_event_;

  Connector connector_;
  CompletionChannel completion_channel_;
  CompletionQueue completions_;
  RequestChannel request_channel_;
  LocalBuffers local_buffers_;
  uint32_t inline_bytes_ = 0;
  std::vector<VerbsLane> lanes_;

  transport::Slices slices_;
  std::optional<transport::Slice> waiting_;  // taken from slices_, for a buffer to be free
  std::unordered_map<uint32_t, RemoteSegment> remote_segments_;  // by handle
};

}  // namespace hbm::verbs
