#include "box/verbs/server/shared_queues.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.h"
#include "box/verbs/common/buffer_pool.h"
#include "box/verbs/common/tuning.h"
#include "box/verbs/server/peer.h"

namespace hbm::box::verbs::server {

SharedQueues::SharedQueues(std::shared_ptr<common::Domain> domain, uint32_t messages,
                           uint32_t completions)
    : domain_(std::move(domain)),
      requests_(domain_, std::min(messages, static_cast<uint32_t>(domain_->limits().max_srq_wr)),
                common::kRequestBytes),
      replies_(domain_, common::kLongReplyBuffers, common::kReplyBytes) {
  completion_channel_.reset(ibv_create_comp_channel(domain_->device()));
  if (completion_channel_ == nullptr) {
    throw Error(ErrorKind::kUnavailable, common::refused("create a completion channel", errno));
  }
  fcntl(completion_channel_->fd, F_SETFL, fcntl(completion_channel_->fd, F_GETFL) | O_NONBLOCK);
  const auto entries =
      std::min<uint64_t>(uint64_t{requests_.count()} + completions, domain_->limits().max_cqe);
  room_ = static_cast<uint32_t>(entries) - requests_.count();
  completions_.reset(ibv_create_cq(domain_->device(), static_cast<int>(entries), nullptr,
                                   completion_channel_.get(), 0));
  ibv_srq_init_attr attributes{};
  attributes.attr.max_wr = requests_.count();
  attributes.attr.max_sge = 1;
  if (completions_ != nullptr) receives_.reset(ibv_create_srq(domain_->get(), &attributes));
  if (receives_ == nullptr) {
    throw Error(
        ErrorKind::kUnavailable,
        common::refused("create the queues for " + std::to_string(messages) + " messages", errno));
  }
  std::vector<uint32_t> buffers;
  while (const auto buffer = requests_.take()) buffers.push_back(*buffer);
  receive(buffers);
}

void SharedQueues::enter(uint32_t queue_pair, std::shared_ptr<Peer> peer) {
  const std::scoped_lock lock(mutex_);
  peers_[queue_pair] = std::move(peer);
}

void SharedQueues::leave(uint32_t queue_pair) {
  const std::scoped_lock lock(mutex_);
  peers_.erase(queue_pair);
}

std::shared_ptr<Peer> SharedQueues::peer_of(uint32_t queue_pair) {
  const std::scoped_lock lock(mutex_);
  const auto peer = peers_.find(queue_pair);
  return peer != peers_.end() ? peer->second : nullptr;
}

std::optional<uint32_t> SharedQueues::take_buffer(const std::shared_ptr<Peer>& peer) {
  const std::scoped_lock lock(mutex_);
  const auto buffer = replies_.take();
  if (!buffer) waiting_.push_back(peer);
  return buffer;
}

void SharedQueues::give_buffer(uint32_t buffer) {
  std::shared_ptr<Peer> next;
  {
    const std::scoped_lock lock(mutex_);
    replies_.give(buffer);
    while (!next && !waiting_.empty()) {
      next = waiting_.front().lock();
      waiting_.pop_front();
    }
  }
  if (next) next->pump();
}

void SharedQueues::receive(std::span<const uint32_t> buffers) {
  std::vector<ibv_sge> entries(buffers.size());
  std::vector<ibv_recv_wr> requests(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    entries[i] = requests_.entry(buffers[i], common::kRequestBytes);
    requests[i].wr_id = common::kReceiveTag << common::kTagShift | buffers[i];
    requests[i].next = i + 1 < buffers.size() ? &requests[i + 1] : nullptr;
    requests[i].sg_list = &entries[i];
    requests[i].num_sge = 1;
  }
  if (requests.empty()) return;
  ibv_recv_wr* bad = nullptr;
  if (const int error = ibv_post_srq_recv(receives_.get(), requests.data(), &bad); error != 0) {
    throw Error(ErrorKind::kUnavailable, common::refused("post receive buffers", error));
  }
}

bool SharedQueues::poll() {
  std::array<ibv_wc, common::kBoxCompletionsPerPoll> completions;
  const int count =
      ibv_poll_cq(completions_.get(), common::kBoxCompletionsPerPoll, completions.data());
  if (count < 0) throw Error(ErrorKind::kUnavailable, "RDMA: the completion queue failed");
  std::vector<uint32_t> buffers;
  for (const ibv_wc& completion : std::span(completions.data(), static_cast<size_t>(count))) {
    const std::shared_ptr<Peer> peer = peer_of(completion.qp_num);
    if (completion.wr_id >> common::kTagShift != common::kReceiveTag) {
      if (peer) peer->completed(completion);
      continue;
    }
    const auto buffer = static_cast<uint32_t>(completion.wr_id);
    if (peer && completion.status == IBV_WC_SUCCESS) {
      peer->arrived({requests_.at(buffer), completion.byte_len});
    }
    buffers.push_back(buffer);
  }
  receive(buffers);
  return count > 0;
}

void SharedQueues::wait(protocol::WakeEvent& wake_event) {
  if (poll()) return;
  ibv_req_notify_cq(completions_.get(), 0);
  if (poll()) return;
  std::array<pollfd, 2> ends{{{completion_channel_->fd, POLLIN, 0}, {wake_event.fd(), POLLIN, 0}}};
  ::poll(ends.data(), ends.size(), -1);
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  if (ends[0].revents != 0 && ibv_get_cq_event(completion_channel_.get(), &queue, &context) == 0) {
    ibv_ack_cq_events(queue, 1);
  }
  if (ends[1].revents != 0) wake_event.clear();
}

}  // namespace hbm::box::verbs::server
