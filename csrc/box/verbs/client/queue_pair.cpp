#include "box/verbs/client/queue_pair.h"

#include <utility>

#include "box/verbs/common/buffer_pool.h"

namespace hbm::box::verbs::client {
namespace {

constexpr uint64_t kNumberMask = (uint64_t{1} << common::kTagShift) - 1;

uint64_t bytes_of(const Posted& posted) { return posted.slice ? posted.slice->transfer.bytes : 0; }

}  // namespace

QueuePair::QueuePair(common::CmId id, uint8_t tag)
    : id_(std::move(id)), tag_(uint64_t{tag} << common::kTagShift) {
  chain_.reserve(common::kQueuePairDepth);
  entries_.reserve(common::kQueuePairDepth);
}

void QueuePair::chain(const ibv_send_wr& request, const ibv_sge& local, Posted what) {
  entries_.push_back(local);
  ibv_send_wr& wr = chain_.emplace_back(request);
  wr.wr_id = tag_ | (first_ + posted_.size());
  moving_bytes_ += bytes_of(what);
  posted_.push_back(std::move(what));
}

void QueuePair::flush() {
  if (chain_.empty()) return;
  for (size_t i = 0; i < chain_.size(); ++i) {
    const bool last = i + 1 == chain_.size();
    chain_[i].next = last ? nullptr : &chain_[i + 1];
    chain_[i].sg_list = &entries_[i];
    chain_[i].num_sge = entries_[i].length > 0 ? 1 : 0;
    if (last || (i + 1) % common::kWorkRequestsPerSignal == 0)
      chain_[i].send_flags |= IBV_SEND_SIGNALED;
  }
  ibv_send_wr* bad = nullptr;
  if (const int error = ibv_post_send(id_->qp, chain_.data(), &bad); error != 0) {
    throw transport::Broken(common::refused("post to the memory box", error));
  }
  chain_.clear();
  entries_.clear();
}

std::vector<Posted> QueuePair::completed(uint64_t wr_id) {
  std::vector<Posted> done;
  for (const uint64_t last = wr_id & kNumberMask; first_ <= last && !posted_.empty(); ++first_) {
    moving_bytes_ -= bytes_of(posted_.front());
    done.push_back(std::move(posted_.front()));
    posted_.pop_front();
  }
  return done;
}

std::deque<Posted> QueuePair::destroy() {
  id_.reset();
  return std::exchange(posted_, {});
}

}  // namespace hbm::box::verbs::client
