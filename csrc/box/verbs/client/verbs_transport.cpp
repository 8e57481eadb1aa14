#include "box/verbs/client/verbs_transport.h"

#include <fcntl.h>
#include <poll.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.h"
#include "base/log.h"
#include "box/protocol/proof.h"
#include "box/verbs/common/buffer_pool.h"
#include "box/verbs/common/tuning.h"

namespace hbm::box::verbs::client {
namespace {

using protocol::Opcode;
using protocol::Status;

uint32_t handle_of(const transport::TransportRequest& request) {
  switch (request.opcode) {
    case Opcode::kAlloc:
      return protocol::read_as<protocol::Alloc>(request.body).handle;
    case Opcode::kAttach:
      return protocol::read_as<protocol::Attach>(request.body).handle;
    default:
      return protocol::read_as<protocol::Release>(request.body).handle;
  }
}

}  // namespace

VerbsTransport::VerbsTransport(const transport::TransportOptions& opening,
                               const protocol::Joined& joined,
                               std::unique_ptr<protocol::FrameStream> stream,
                               protocol::Deadline deadline)
    : box_(opening.host + ":" + std::to_string(opening.port)),
      stream_(std::move(stream)),
      connector_(opening.host, joined.verbs_port, deadline),
      completion_channel_(ibv_create_comp_channel(connector_.domain()->device())),
      request_channel_(connector_.domain()),
      local_buffers_(connector_.domain()) {
  const int entries =
      static_cast<int>(opening.connections * common::kQueuePairDepth + common::kReplyBuffers);
  if (completion_channel_ != nullptr) {
    fcntl(completion_channel_->fd, F_SETFL, fcntl(completion_channel_->fd, F_GETFL) | O_NONBLOCK);
    completions_.reset(ibv_create_cq(connector_.domain()->device(), entries, nullptr,
                                     completion_channel_.get(), 0));
  }
  if (completions_ == nullptr) {
    throw Error(ErrorKind::kUnavailable, common::refused("create a completion queue", errno));
  }
  connect(opening, joined.session);
}

void VerbsTransport::connect(const transport::TransportOptions& opening,
                             const protocol::Id& session) {
  const common::ChallengeMessage challenge = connector_.ask(attributes(/*receives=*/1));
  common::CallMessage call{};
  call.magic = common::CallMessage::kMagic;
  call.challenge_id = challenge.challenge_id;
  call.session = session;
  call.flags = static_cast<uint16_t>(
      opening.join.flags & (protocol::Join::kReadOnlyClient | protocol::Join::kAuthenticated));
  std::optional<protocol::MacKeys> keys;
  call.queue_pairs = static_cast<uint8_t>(opening.connections);
  queue_pairs_.reserve(opening.connections);
  for (uint32_t index = 0; index < opening.connections; ++index) {
    const protocol::Nonce nonce = protocol::random_nonce();
    std::copy_n(nonce.begin(), call.nonce.size(), call.nonce.begin());
    call.queue_pair = static_cast<uint8_t>(index);
    prove(call, opening.token, challenge.hello);
    if (index == 0) keys = mac_keys(call, opening.token, challenge.hello);
    ibv_qp_init_attr given = attributes(index == 0 ? common::kReplyBuffers : 1);
    common::CmId id =
        connector_.connect(call, given, welcome_proof(call, opening.token, challenge.hello));
    inline_bytes_ = std::min(given.cap.max_inline_data, common::kInlineBytes);
    queue_pairs_.emplace_back(std::move(id), static_cast<uint8_t>(index));
  }
  request_channel_.open(queue_pairs_[0].get(), inline_bytes_, keys);
}

ibv_qp_init_attr VerbsTransport::attributes(uint32_t receives) const {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = completions_.get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = common::kQueuePairDepth;
  attributes.cap.max_recv_wr = receives;
  attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
  attributes.cap.max_inline_data = common::kInlineBytes;
  return attributes;
}

bool VerbsTransport::idle() const noexcept {
  return request_channel_.idle() && std::ranges::all_of(queue_pairs_, &QueuePair::idle);
}

void VerbsTransport::post(transport::TransportRequest& request) {
  if (!alive()) throw transport::Broken(cause_);
  const bool was_idle = idle();
  if (request.opcode == Opcode::kRead || request.opcode == Opcode::kWrite) {
    slices_.put(request);
  } else {
    request_channel_.put(request);
  }
  if (was_idle) send();
}

void VerbsTransport::send() {
  request_channel_.send(queue_pairs_[0]);
  send_slices();
  try {
    for (QueuePair& queue_pair : queue_pairs_) queue_pair.flush();
  } catch (const transport::Broken& broken) {
    fail(broken.what());
  }
}

std::optional<size_t> VerbsTransport::least_busy() const noexcept {
  const auto least = std::ranges::min_element(queue_pairs_, {}, [](const QueuePair& queue_pair) {
    return queue_pair.has_room() ? queue_pair.moving_bytes() : UINT64_MAX;
  });
  if (!least->has_room() || least->moving_bytes() >= common::kQueuePairBytesInFlight)
    return std::nullopt;
  return static_cast<size_t>(least - queue_pairs_.begin());
}

void VerbsTransport::send_slices() {
  while (const auto index = least_busy()) {
    if (!waiting_) waiting_ = slices_.take();
    if (!waiting_ || !(refused_here(*waiting_) || chain(*index, *waiting_))) return;
    waiting_.reset();
  }
}

// Checks the access of a slice, because the box's device would close the queue pair on an invalid
// one. Finishes an invalid slice with the refusal, and returns true.
bool VerbsTransport::refused_here(const transport::Slice& slice) {
  const protocol::Transfer& transfer = slice.transfer;
  const auto remote = remote_segments_.find(transfer.handle);
  if (remote == remote_segments_.end()) {
    slices_.finish(slice, Status::kNotAttached,
                   "no segment is attached as " + std::to_string(transfer.handle));
    return true;
  }
  if (remote->second.contains(transfer)) return false;
  slices_.finish(slice, Status::kRange,
                 std::to_string(transfer.bytes) + " B at " + std::to_string(transfer.offset) +
                     " are past the end of a segment of " + std::to_string(remote->second.size) +
                     " B");
  return true;
}

bool VerbsTransport::chain(size_t index, const transport::Slice& slice) {
  auto local = local_buffers_.buffer_for(slice, inline_bytes_);
  if (!local) return false;
  const RemoteSegment& remote = remote_segments_.at(slice.transfer.handle);
  ibv_send_wr wr{};
  wr.opcode = slice.opcode == Opcode::kRead ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
  wr.send_flags = local->is_inline ? IBV_SEND_INLINE : 0;
  wr.wr.rdma.remote_addr = remote.address + slice.transfer.offset;
  wr.wr.rdma.rkey = remote.rkeys[index];
  queue_pairs_[index].chain(wr, local->entry, std::move(local->uses));
  return true;
}

void VerbsTransport::progress(std::chrono::nanoseconds most) {
  if (!alive()) throw transport::Broken(cause_);
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    send();
    if (poll() || idle()) return;
    const auto spent = std::chrono::steady_clock::now() - start;
    if (spent >= most) return;
    if (spent >= common::kPollTime && sleep(most - spent)) return;
  }
}

bool VerbsTransport::poll() {
  bool finished = false;
  std::array<ibv_wc, common::kClientCompletionsPerPoll> completions;
  for (;;) {
    const int count =
        ibv_poll_cq(completions_.get(), common::kClientCompletionsPerPoll, completions.data());
    if (count < 0) fail("RDMA: the completion queue failed");
    for (int i = 0; i < count; ++i) finished |= handle_completion(completions[i]);
    if (count < common::kClientCompletionsPerPoll) return finished;
  }
}

bool VerbsTransport::handle_completion(const ibv_wc& completion) {
  const uint64_t tag = completion.wr_id >> common::kTagShift;
  const bool good = completion.status == IBV_WC_SUCCESS;
  const std::string cause =
      good ? "" : std::string("RDMA: ") + ibv_wc_status_str(completion.status);
  if (tag == common::kReceiveTag) {
    if (!good) fail(cause);
    try {
      transport::TransportRequest* request =
          request_channel_.arrived(static_cast<uint32_t>(completion.wr_id), completion.byte_len);
      return request != nullptr && answered(*request);
    } catch (const transport::Broken& broken) {
      fail(broken.what());
    }
  }
  std::vector<Posted> done = queue_pairs_[tag].completed(completion.wr_id);
  std::vector<Posted> failed;
  if (!good && !done.empty()) {
    failed.push_back(std::move(done.back()));
    done.pop_back();
  }
  bool finished = false;
  for (const Posted& posted : done) finished |= finish(posted, true);
  if (good) return finished;
  if (completion.status == IBV_WC_REM_ACCESS_ERR) quit(failed);
  fail(cause);
}

bool VerbsTransport::finish(const Posted& posted, bool arrived) {
  if (!posted.slice) {
    request_channel_.sent(*posted.buffer);
    return false;
  }
  local_buffers_.done(posted, arrived);
  return slices_.finish(*posted.slice, Status::kOk, {});
}

bool VerbsTransport::answered(transport::TransportRequest& request) {
  if (request.status == Status::kOk) {
    if (request.opcode == Opcode::kAlloc || request.opcode == Opcode::kAttach) {
      grant(request);
    } else if (request.opcode == Opcode::kFree) {
      remote_segments_.erase(handle_of(request));
    }
  }
  request.done.store(true, std::memory_order_release);
  return true;
}

void VerbsTransport::grant(transport::TransportRequest& request) {
  RemoteSegment segment = granted_segment(request, queue_pairs_.size());
  auto grant = std::make_shared<transport::Grant>();
  grant->handle = handle_of(request);
  grant->size = segment.size;
  remote_segments_.insert_or_assign(grant->handle, std::move(segment));
  request.payload.clear();
  request.granted = std::move(grant);
}

bool VerbsTransport::sleep(std::chrono::nanoseconds most) {
  ibv_req_notify_cq(completions_.get(), 0);
  std::array<ibv_wc, 1> completion;
  if (const int count = ibv_poll_cq(completions_.get(), 1, completion.data()); count != 0) {
    if (count < 0) fail("RDMA: the completion queue failed");
    return handle_completion(completion[0]);
  }
  std::array<pollfd, 4> ends{{{completion_channel_->fd, POLLIN, 0},
                              {wake_event_.fd(), POLLIN, 0},
                              {connector_.fd(), POLLIN, 0},
                              {stream_->fd(), POLLIN | POLLRDHUP, 0}}};
  const auto seconds = std::chrono::floor<std::chrono::seconds>(most);
  const timespec timeout{seconds.count(), (most - seconds).count()};
  if (ppoll(ends.data(), ends.size(), &timeout, nullptr) <= 0) return false;
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  if (ends[0].revents != 0 && ibv_get_cq_event(completion_channel_.get(), &queue, &context) == 0) {
    ibv_ack_cq_events(queue, 1);
  }
  if (ends[2].revents != 0 && connector_.closed()) fail("it closed the queue pairs");
  if (ends[3].revents != 0) fail("it closed the connection");
  if (ends[1].revents == 0) return false;
  wake_event_.clear();
  return true;
}

std::shared_ptr<void> VerbsTransport::register_memory(std::byte* memory, uint64_t bytes) {
  try {
    return local_buffers_.register_memory(memory, bytes);
  } catch (const Error& error) {
    log::notice(std::string(error.what()) + "; transfers of this memory are copied on their way");
    return nullptr;
  }
}

// Fails the requests whose slices the box refused, so that they are not posted again. All other
// requests stay unfinished.
void VerbsTransport::quit(const std::vector<Posted>& failed) {
  const std::string cause =
      "the memory box denied access to that memory: the attachment has ended, or is for "
      "reading";
  std::vector<transport::Slice> slices;
  for (QueuePair& queue_pair : queue_pairs_) {
    for (const Posted& posted : queue_pair.destroy()) {
      if (posted.slice) slices.push_back(*posted.slice);
    }
  }
  for (const Posted& posted : failed) {
    if (!posted.slice) continue;
    for (const transport::Slice& slice : slices) {
      if (slice.of == posted.slice->of) slices_.finish(slice, Status::kOk, {});
    }
    if (waiting_ && waiting_->of == posted.slice->of) slices_.finish(*waiting_, Status::kOk, {});
    slices_.finish(*posted.slice, Status::kNotAttached, cause);
  }
  fail(cause);
}

void VerbsTransport::fail(const std::string& cause) {
  cause_ = "the connection to the memory box at " + box_ + " is lost: " + cause;
  alive_.store(false, std::memory_order_release);
  for (QueuePair& queue_pair : queue_pairs_) queue_pair.destroy();
  throw transport::Broken(cause_);
}

}  // namespace hbm::box::verbs::client
