#include "box/verbs/server/peer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "box/server/request_handler.h"
#include "box/verbs/common/buffer_pool.h"
#include "box/verbs/server/reply_message.h"
#include "box/verbs/server/request_message.h"

namespace hbm::verbs {
namespace {

using smb::Opcode;
using smb::Status;

void put_keys(box::Reply& reply, uint64_t address, const std::vector<uint32_t>& keys) {
  auto allocated = smb::read_as<smb::Allocated>(reply.body);
  allocated.address = address;
  std::memcpy(reply.body.data(), &allocated, sizeof(allocated));
  reply.payload.resize(keys.size() * sizeof(keys[0]));
  std::memcpy(reply.payload.data(), keys.data(), reply.payload.size());
}

}  // namespace

Peer::Peer(std::shared_ptr<Context> context, std::shared_ptr<box::Session> session, uint32_t lanes,
           const std::optional<smb::SealKeys>& keys)
    : context_(std::move(context)), session_(std::move(session)), lane_count_(lanes) {
  if (!keys) return;
  of_requests_.emplace(keys->to_box);
  of_replies_.emplace(keys->to_client);
}

void Peer::add(CmId id, uint32_t inline_bytes) {
  context_->queues.enter(id->qp->qp_num, shared_from_this());
  const std::scoped_lock lock(mutex_);
  if (lanes_.empty()) inline_bytes_ = inline_bytes;
  lanes_.push_back(std::move(id));
}

void Peer::ready(ibv_qp* queue_pair) {
  wait_briefly_for_receivers(queue_pair);
  const std::scoped_lock lock(mutex_);
  ++connected_;
}

bool Peer::closed() const {
  const std::scoped_lock lock(mutex_);
  return closed_;
}

bool Peer::complete() const {
  const std::scoped_lock lock(mutex_);
  return connected_ == lane_count_;
}

bool Peer::settled() const {
  const std::scoped_lock lock(mutex_);
  return closed_ || (unanswered_ == 0 && unsent_.empty() && in_flight_ == 0);
}

void Peer::doom(const std::string& cause) {
  if (doomed_.exchange(true)) return;
  if (!cause.empty()) log::warn("a client of the memory box over RDMA is sent away: " + cause);
  context_->doomed.signal();
}

void Peer::arrived(std::span<const std::byte> message) {
  seen_.store(Clock::now(), std::memory_order_relaxed);
  RequestMessage request;
  try {
    request = parse_request(of_requests_ ? of_requests_->open(message) : message);
  } catch (const Error& error) {
    return doom(error.what());
  }
  const smb::Header& header = request.header;
  {
    const std::scoped_lock lock(mutex_);
    if (closed_ || doomed()) return;
    if (context_->closing.load(std::memory_order_relaxed)) {
      queue(header.id, header.opcode,
            box::refused(Status::kClosing, "the memory box is shutting down"));
      return send();
    }
    ++unanswered_;
  }
  context_->handler.submit(
      session_, header.opcode, request.body,
      [self = shared_from_this(), id = header.id, opcode = header.opcode, handle = request.handle](
          box::Reply reply) { self->answer(id, opcode, handle, std::move(reply)); });
}

void Peer::answer(uint64_t id, Opcode opcode, uint32_t handle, box::Reply reply) {
  const bool malformed = reply.status == Status::kMalformed;
  std::string trouble;
  {
    const std::scoped_lock lock(mutex_);
    --unanswered_;
    if (closed_) return;
    const bool good = reply.status == Status::kOk;
    if (good && opcode == Opcode::kFree) windows_.erase(handle);
    if (good && opcode == Opcode::kLeave) windows_.clear();
    try {
      if (good && reply.granted) {
        grant(id, opcode, handle, std::move(reply));
      } else {
        queue(id, opcode, reply);
      }
      send();
    } catch (const Error& error) {
      trouble = error.what();
    }
    if (unsent_.size() > kMostUnsentReplies) trouble = "it does not take its replies";
  }
  if (malformed) trouble = "its request is malformed";
  if (!trouble.empty()) doom(trouble);
}

void Peer::queue(uint64_t id, Opcode opcode, const box::Reply& reply) {
  std::vector<std::byte>& bytes = unsent_.emplace_back().bytes;
  bytes = reply_message(id, opcode, reply);
  if (of_replies_) seal(bytes);
}

// Puts a tag behind each part that send_part() sends.
void Peer::seal(std::vector<std::byte>& reply) {
  constexpr size_t kPart = kReplyBytes - sizeof(smb::Tag);
  std::vector<std::byte> sealed;
  for (size_t at = 0; at < reply.size(); at += kPart) {
    const auto part = std::span(reply).subspan(at, std::min(kPart, reply.size() - at));
    const smb::Tag tag = of_replies_->next(part);
    sealed.insert(sealed.end(), part.begin(), part.end());
    sealed.insert(sealed.end(), tag.begin(), tag.end());
  }
  reply = std::move(sealed);
}

void Peer::grant(uint64_t id, Opcode opcode, uint32_t handle, box::Reply reply) {
  const std::shared_ptr<box::BoxSegment> segment = std::move(reply.granted);
  if (context_->memory.windows()) {
    bindings_.push_back({handle, segment, reply.may_write, id, opcode, std::move(reply), {}, 0});
    if (bindings_.size() == 1) bind_next();
    return;
  }
  const uint32_t key = BoxMemory::shared_key(*segment, reply.may_write);
  put_keys(reply, reinterpret_cast<uintptr_t>(segment->block->base()),
           std::vector<uint32_t>(lane_count_, key));
  queue(id, opcode, reply);
}

void Peer::bind_next() {
  while (!bindings_.empty()) {
    Binding& binding = bindings_.front();
    try {
      for (size_t lane = 0; lane < lanes_.size(); ++lane) {
        binding.windows.emplace_back(*context_->queues.domain(), binding.segment,
                                     binding.may_write);
      }
    } catch (const Error& error) {
      queue(binding.id, binding.opcode, box::refused(Status::kExhausted, error.what()));
      bindings_.pop_front();
      continue;
    }
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      binding.windows[lane].bind(lanes_[lane]->qp, kBindTag << kTagShift);
      ++binding.left;
      ++in_flight_;
    }
    return;
  }
}

void Peer::bound() {
  if (--bindings_.front().left > 0) return;
  Binding binding = std::move(bindings_.front());
  bindings_.pop_front();
  std::vector<uint32_t> keys;
  for (const MemoryWindow& window : binding.windows) keys.push_back(window.key());
  put_keys(binding.reply, reinterpret_cast<uintptr_t>(binding.segment->block->base()), keys);
  queue(binding.id, binding.opcode, binding.reply);
  windows_.insert_or_assign(binding.handle, std::move(binding.windows));
  bind_next();
}

void Peer::completed(const ibv_wc& completion) {
  const uint64_t kind = completion.wr_id >> kTagShift;
  const auto slot = static_cast<uint32_t>(completion.wr_id);
  const bool good = completion.status == IBV_WC_SUCCESS;
  std::string trouble;
  bool give = false;
  {
    const std::scoped_lock lock(mutex_);
    --in_flight_;
    if (kind == kReplyTag) {
      --replies_in_flight_;
      give = slot != kNoSlot && std::erase(slots_, slot) > 0;
    }
    if (!closed_ && good) {
      try {
        if (kind == kBindTag) bound();
        send();
      } catch (const Error& error) {
        trouble = error.what();
      }
    }
  }
  if (give) context_->queues.give_slot(slot);
  if (!trouble.empty() || !good) doom(trouble);
}

void Peer::pump() {
  std::string trouble;
  {
    const std::scoped_lock lock(mutex_);
    if (closed_) return;
    try {
      send();
    } catch (const Error& error) {
      trouble = error.what();
    }
  }
  if (!trouble.empty()) doom(trouble);
}

void Peer::send() {
  while (!unsent_.empty() && replies_in_flight_ < kRepliesInFlight) {
    if (!send_part(unsent_.front())) return;
    if (unsent_.front().sent == unsent_.front().bytes.size()) unsent_.pop_front();
  }
}

bool Peer::send_part(UnsentReply& reply) {
  const auto left = std::span(reply.bytes).subspan(reply.sent);
  const auto bytes = static_cast<uint32_t>(std::min<size_t>(left.size(), kReplyBytes));
  ibv_sge entry{reinterpret_cast<uintptr_t>(left.data()), bytes, 0};
  ibv_send_wr wr{};
  wr.wr_id = kReplyTag << kTagShift | kNoSlot;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
  wr.sg_list = &entry;
  wr.num_sge = 1;
  if (bytes > inline_bytes_) {
    const auto slot = context_->queues.take_slot(shared_from_this());
    if (!slot) return false;
    slots_.push_back(*slot);
    std::memcpy(context_->queues.slots().at(*slot), left.data(), bytes);
    entry = context_->queues.slots().entry(*slot, bytes);
    wr.wr_id = kReplyTag << kTagShift | *slot;
    wr.send_flags = IBV_SEND_SIGNALED;
  }
  ibv_send_wr* bad = nullptr;
  if (const int error = ibv_post_send(lanes_[0]->qp, &wr, &bad); error != 0) {
    throw Error(ErrorKind::kNetwork, refused("post a reply", error));
  }
  reply.sent += bytes;
  ++replies_in_flight_;
  ++in_flight_;
  return true;
}

void Peer::close() {
  {
    const std::scoped_lock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    unsent_.clear();
    for (const CmId& lane : lanes_) rdma_disconnect(lane.get());
  }
  context_->handler.left(session_);
}

bool Peer::quiet() const {
  const std::scoped_lock lock(mutex_);
  return in_flight_ == 0;
}

void Peer::destroy() {
  std::vector<uint32_t> slots;
  {
    const std::scoped_lock lock(mutex_);
    for (const CmId& lane : lanes_) context_->queues.leave(lane->qp->qp_num);
    bindings_.clear();  // a queue pair goes after the windows that are bound to it
    windows_.clear();
    lanes_.clear();
    slots = std::exchange(slots_, {});
  }
  for (const uint32_t slot : slots) context_->queues.give_slot(slot);
}

}  // namespace hbm::verbs
