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

namespace hbm::box::verbs::server {
namespace {

using protocol::Opcode;
using protocol::Status;

void put_keys(box::server::Reply& reply, uint64_t address, const std::vector<uint32_t>& keys) {
  auto allocated = protocol::read_as<protocol::Allocated>(reply.body);
  allocated.address = address;
  std::memcpy(reply.body.data(), &allocated, sizeof(allocated));
  reply.payload.resize(keys.size() * sizeof(keys[0]));
  std::memcpy(reply.payload.data(), keys.data(), reply.payload.size());
}

}  // namespace

Peer::Peer(std::shared_ptr<Context> context, std::shared_ptr<box::server::Session> session,
           uint32_t queue_pairs, const std::optional<protocol::MacKeys>& keys)
    : context_(std::move(context)), session_(std::move(session)), queue_pair_count_(queue_pairs) {
  if (!keys) return;
  request_authenticator_.emplace(keys->to_box);
  reply_authenticator_.emplace(keys->to_client);
}

void Peer::add(common::CmId id, uint32_t inline_bytes) {
  context_->queues.enter(id->qp->qp_num, shared_from_this());
  const std::scoped_lock lock(mutex_);
  if (queue_pairs_.empty()) inline_bytes_ = inline_bytes;
  queue_pairs_.push_back(std::move(id));
}

void Peer::ready(ibv_qp* queue_pair) {
  common::wait_briefly_for_receivers(queue_pair);
  const std::scoped_lock lock(mutex_);
  ++connected_;
}

bool Peer::closed() const {
  const std::scoped_lock lock(mutex_);
  return closed_;
}

bool Peer::complete() const {
  const std::scoped_lock lock(mutex_);
  return connected_ == queue_pair_count_;
}

bool Peer::settled() const {
  const std::scoped_lock lock(mutex_);
  return closed_ || (unanswered_ == 0 && unsent_.empty() && in_flight_ == 0);
}

void Peer::doom(const std::string& cause) {
  if (doomed_.exchange(true)) return;
  if (!cause.empty()) log::warn("closes a client of the memory box over RDMA: " + cause);
  context_->doomed.signal();
}

void Peer::arrived(std::span<const std::byte> message) {
  seen_.store(Clock::now(), std::memory_order_relaxed);
  RequestMessage request;
  try {
    request =
        parse_request(request_authenticator_ ? request_authenticator_->verify(message) : message);
  } catch (const Error& error) {
    return doom(error.what());
  }
  const protocol::Header& header = request.header;
  {
    const std::scoped_lock lock(mutex_);
    if (closed_ || doomed()) return;
    if (context_->closing.load(std::memory_order_relaxed)) {
      queue(header.id, header.opcode,
            box::server::refused(Status::kClosing, "the memory box is shutting down"));
      return send();
    }
    ++unanswered_;
  }
  context_->handler.submit(
      session_, header.opcode, request.body,
      [self = shared_from_this(), id = header.id, opcode = header.opcode, handle = request.handle](
          box::server::Reply reply) { self->answer(id, opcode, handle, std::move(reply)); });
}

void Peer::answer(uint64_t id, Opcode opcode, uint32_t handle, box::server::Reply reply) {
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
    if (unsent_.size() > common::kMostUnsentReplies) trouble = "it does not take its replies";
  }
  if (malformed) trouble = "its request is malformed";
  if (!trouble.empty()) doom(trouble);
}

void Peer::queue(uint64_t id, Opcode opcode, const box::server::Reply& reply) {
  std::vector<std::byte>& bytes = unsent_.emplace_back().bytes;
  bytes = reply_message(id, opcode, reply);
  if (reply_authenticator_) add_tags(bytes);
}

// Appends a tag to each part that send_part() sends.
void Peer::add_tags(std::vector<std::byte>& reply) {
  constexpr size_t kPart = common::kReplyBytes - sizeof(protocol::Tag);
  std::vector<std::byte> tagged;
  for (size_t at = 0; at < reply.size(); at += kPart) {
    const auto part = std::span(reply).subspan(at, std::min(kPart, reply.size() - at));
    const protocol::Tag tag = reply_authenticator_->next_tag(part);
    tagged.insert(tagged.end(), part.begin(), part.end());
    tagged.insert(tagged.end(), tag.begin(), tag.end());
  }
  reply = std::move(tagged);
}

void Peer::grant(uint64_t id, Opcode opcode, uint32_t handle, box::server::Reply reply) {
  const std::shared_ptr<box::server::storage::BoxSegment> segment = std::move(reply.granted);
  if (context_->memory.windows()) {
    bindings_.push_back({handle, segment, reply.may_write, id, opcode, std::move(reply), {}, 0});
    if (bindings_.size() == 1) bind_next();
    return;
  }
  const uint32_t key = BoxMemory::shared_key(*segment, reply.may_write);
  put_keys(reply, reinterpret_cast<uintptr_t>(segment->block->base()),
           std::vector<uint32_t>(queue_pair_count_, key));
  queue(id, opcode, reply);
}

void Peer::bind_next() {
  while (!bindings_.empty()) {
    Binding& binding = bindings_.front();
    try {
      for (size_t index = 0; index < queue_pairs_.size(); ++index) {
        binding.windows.emplace_back(*context_->queues.domain(), binding.segment,
                                     binding.may_write);
      }
    } catch (const Error& error) {
      queue(binding.id, binding.opcode, box::server::refused(Status::kExhausted, error.what()));
      bindings_.pop_front();
      continue;
    }
    for (size_t index = 0; index < queue_pairs_.size(); ++index) {
      binding.windows[index].bind(queue_pairs_[index]->qp, common::kBindTag << common::kTagShift);
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
  const uint64_t kind = completion.wr_id >> common::kTagShift;
  const auto buffer = static_cast<uint32_t>(completion.wr_id);
  const bool good = completion.status == IBV_WC_SUCCESS;
  std::string trouble;
  bool give = false;
  {
    const std::scoped_lock lock(mutex_);
    --in_flight_;
    if (kind == common::kReplyTag) {
      --replies_in_flight_;
      give = buffer != common::kNoBuffer && std::erase(buffers_, buffer) > 0;
    }
    if (!closed_ && good) {
      try {
        if (kind == common::kBindTag) bound();
        send();
      } catch (const Error& error) {
        trouble = error.what();
      }
    }
  }
  if (give) context_->queues.give_buffer(buffer);
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
  while (!unsent_.empty() && replies_in_flight_ < common::kRepliesInFlight) {
    if (!send_part(unsent_.front())) return;
    if (unsent_.front().sent == unsent_.front().bytes.size()) unsent_.pop_front();
  }
}

bool Peer::send_part(UnsentReply& reply) {
  const auto left = std::span(reply.bytes).subspan(reply.sent);
  const auto bytes = static_cast<uint32_t>(std::min<size_t>(left.size(), common::kReplyBytes));
  ibv_sge entry{reinterpret_cast<uintptr_t>(left.data()), bytes, 0};
  ibv_send_wr wr{};
  wr.wr_id = common::kReplyTag << common::kTagShift | common::kNoBuffer;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
  wr.sg_list = &entry;
  wr.num_sge = 1;
  if (bytes > inline_bytes_) {
    const auto buffer = context_->queues.take_buffer(shared_from_this());
    if (!buffer) return false;
    buffers_.push_back(*buffer);
    std::memcpy(context_->queues.reply_buffers().at(*buffer), left.data(), bytes);
    entry = context_->queues.reply_buffers().entry(*buffer, bytes);
    wr.wr_id = common::kReplyTag << common::kTagShift | *buffer;
    wr.send_flags = IBV_SEND_SIGNALED;
  }
  ibv_send_wr* bad = nullptr;
  if (const int error = ibv_post_send(queue_pairs_[0]->qp, &wr, &bad); error != 0) {
    throw Error(ErrorKind::kNetwork, common::refused("post a reply", error));
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
    for (const common::CmId& queue_pair : queue_pairs_) rdma_disconnect(queue_pair.get());
  }
  context_->handler.left(session_);
}

bool Peer::quiet() const {
  const std::scoped_lock lock(mutex_);
  return in_flight_ == 0;
}

void Peer::destroy() {
  std::vector<uint32_t> buffers;
  {
    const std::scoped_lock lock(mutex_);
    for (const common::CmId& queue_pair : queue_pairs_)
      context_->queues.leave(queue_pair->qp->qp_num);
    bindings_.clear();  // windows must be destroyed before their queue pair
    windows_.clear();
    queue_pairs_.clear();
    buffers = std::exchange(buffers_, {});
  }
  for (const uint32_t buffer : buffers) context_->queues.give_buffer(buffer);
}

}  // namespace hbm::box::verbs::server
