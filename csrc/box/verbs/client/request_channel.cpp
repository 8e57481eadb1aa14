#include "box/verbs/client/request_channel.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace hbm::verbs {
namespace {

uint64_t frame_bytes(const smb::Header& header) {
  return sizeof(header) + uint64_t{header.body_bytes} + header.payload_bytes;
}

}  // namespace

RequestChannel::RequestChannel(const std::shared_ptr<Domain>& domain)
    : requests_(domain, kRequests, kRequestBytes), replies_(domain, kReceives, kReplyBytes) {}

void RequestChannel::open(ibv_qp* queue_pair, uint32_t inline_bytes,
                          const std::optional<smb::SealKeys>& keys) {
  if (keys) {
    of_requests_.emplace(keys->to_box);
    of_replies_.emplace(keys->to_client);
  }
  queue_pair_ = queue_pair;
  inline_bytes_ = inline_bytes;
  wait_briefly_for_receivers(queue_pair_);
  for (uint32_t slot = 0; slot < kReceives; ++slot) receive(slot);
}

void RequestChannel::receive(uint32_t slot) {
  ibv_sge entry = replies_.entry(slot, kReplyBytes);
  ibv_recv_wr wr{};
  wr.wr_id = kReceiveTag << kTagShift | slot;
  wr.sg_list = &entry;
  wr.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  if (const int error = ibv_post_recv(queue_pair_, &wr, &bad); error != 0) {
    throw transport::Broken(refused("receive from the memory box", error));
  }
}

void RequestChannel::send(VerbsLane& lane) {
  while (!unsent_.empty() && lane.has_room()) {
    const auto slot = requests_.take();
    if (!slot) return;
    transport::TransportRequest& request = *unsent_.front();
    unsent_.pop_front();

    smb::Header header;
    header.opcode = request.opcode;
    header.body_bytes = static_cast<uint32_t>(request.body.size());
    header.id = ++last_id_;
    std::byte* const message = requests_.at(*slot);
    uint64_t bytes = frame_bytes(header);
    std::memcpy(message, &header, sizeof(header));
    std::ranges::copy(request.body, message + sizeof(header));
    if (of_requests_) {
      std::ranges::copy(of_requests_->next({message, bytes}), message + bytes);
      bytes += sizeof(smb::Tag);
    }
    const ibv_sge frame = requests_.entry(*slot, static_cast<uint32_t>(bytes));

    ibv_send_wr wr{};
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = frame.length <= inline_bytes_ ? IBV_SEND_INLINE : 0;
    lane.chain(wr, frame, {.slice = {}, .slot = slot, .region = {}});
    asked_.emplace(header.id, &request);
  }
}

transport::TransportRequest* RequestChannel::arrived(uint32_t slot, uint32_t bytes) {
  std::span<const std::byte> message(replies_.at(slot), bytes);
  if (of_replies_) {
    try {
      message = of_replies_->open(message);
    } catch (const smb::Forged& forged) {
      throw transport::Broken(forged.what());
    }
  }
  if (partial_.empty() && message.size() >= sizeof(smb::Header)) {
    smb::Header header;
    std::memcpy(&header, message.data(), sizeof(header));
    if (const char* cause = malformed_reply(header)) {
      throw transport::Broken(std::string("the memory box sent what is no reply: ") + cause);
    }
    if (frame_bytes(header) == message.size()) {
      transport::TransportRequest* request = answer(message);
      receive(slot);
      return request;
    }
  }
  partial_.insert(partial_.end(), message.begin(), message.end());
  receive(slot);
  smb::Header header;
  if (partial_.size() < sizeof(header)) {
    throw transport::Broken("the memory box sent a message without a header");
  }
  std::memcpy(&header, partial_.data(), sizeof(header));
  if (partial_.size() < frame_bytes(header)) return nullptr;
  return answer(std::exchange(partial_, {}));
}

transport::TransportRequest* RequestChannel::answer(std::span<const std::byte> frame) {
  smb::Header header;
  std::memcpy(&header, frame.data(), sizeof(header));
  const auto asked = asked_.find(header.id);
  if (frame.size() != frame_bytes(header) || asked == asked_.end() ||
      asked->second->opcode != header.opcode) {
    throw transport::Broken("the memory box sent a reply to nothing that was asked");
  }
  transport::TransportRequest& request = *asked->second;
  asked_.erase(asked);
  const auto body = frame.subspan(sizeof(header), header.body_bytes);
  const auto payload = frame.subspan(sizeof(header) + header.body_bytes);
  request.status = header.status;
  request.reply.assign(body.begin(), body.end());
  if (header.status == smb::Status::kOk) {
    request.payload.assign(payload.begin(), payload.end());
  } else {
    request.cause.assign(reinterpret_cast<const char*>(payload.data()), payload.size());
  }
  return &request;
}

}  // namespace hbm::verbs
