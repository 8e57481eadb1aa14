#include "box/verbs/client/request_channel.h"

#include <algorithm>
#include <cstring>

#include "box/verbs/common/tuning.h"

namespace hbm::verbs {

RequestChannel::RequestChannel(const std::shared_ptr<Domain>& domain)
    : requests_(domain, kMessagesInFlight, kRequestBytes),
      replies_(domain, kReplyBuffers, kReplyBytes) {}

void RequestChannel::open(ibv_qp* queue_pair, uint32_t inline_bytes,
                          const std::optional<smb::SealKeys>& keys) {
  if (keys) {
    of_requests_.emplace(keys->to_box);
    assembly_.seal(keys->to_client);
  }
  queue_pair_ = queue_pair;
  inline_bytes_ = inline_bytes;
  wait_briefly_for_receivers(queue_pair_);
  for (uint32_t slot = 0; slot < kReplyBuffers; ++slot) receive(slot);
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
    header.id = assembly_.expect(request);
    std::byte* const message = requests_.at(*slot);
    uint64_t bytes = sizeof(header) + request.body.size();
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
  }
}

transport::TransportRequest* RequestChannel::arrived(uint32_t slot, uint32_t bytes) {
  transport::TransportRequest* const answered = assembly_.take({replies_.at(slot), bytes});
  receive(slot);
  return answered;
}

}  // namespace hbm::verbs
