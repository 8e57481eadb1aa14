#include "box/verbs/client/request_channel.h"

#include <algorithm>
#include <cstring>

#include "box/verbs/common/tuning.h"

namespace hbm::box::verbs::client {

RequestChannel::RequestChannel(const std::shared_ptr<common::Domain>& domain)
    : requests_(domain, common::kMessagesInFlight, common::kRequestBytes),
      replies_(domain, common::kReplyBuffers, common::kReplyBytes) {}

void RequestChannel::open(ibv_qp* queue_pair, uint32_t inline_bytes,
                          const std::optional<protocol::MacKeys>& keys) {
  if (keys) {
    request_authenticator_.emplace(keys->to_box);
    assembly_.authenticate(keys->to_client);
  }
  queue_pair_ = queue_pair;
  inline_bytes_ = inline_bytes;
  common::wait_briefly_for_receivers(queue_pair_);
  for (uint32_t buffer = 0; buffer < common::kReplyBuffers; ++buffer) receive(buffer);
}

void RequestChannel::receive(uint32_t buffer) {
  ibv_sge entry = replies_.entry(buffer, common::kReplyBytes);
  ibv_recv_wr wr{};
  wr.wr_id = common::kReceiveTag << common::kTagShift | buffer;
  wr.sg_list = &entry;
  wr.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  if (const int error = ibv_post_recv(queue_pair_, &wr, &bad); error != 0) {
    throw transport::Broken(common::refused("receive from the memory box", error));
  }
}

void RequestChannel::send(QueuePair& queue_pair) {
  while (!unsent_.empty() && queue_pair.has_room()) {
    const auto buffer = requests_.take();
    if (!buffer) return;
    transport::TransportRequest& request = *unsent_.front();
    unsent_.pop_front();

    protocol::Header header;
    header.opcode = request.opcode;
    header.body_bytes = static_cast<uint32_t>(request.body.size());
    header.id = assembly_.expect(request);
    std::byte* const message = requests_.at(*buffer);
    uint64_t bytes = sizeof(header) + request.body.size();
    std::memcpy(message, &header, sizeof(header));
    std::ranges::copy(request.body, message + sizeof(header));
    if (request_authenticator_) {
      std::ranges::copy(request_authenticator_->next_tag({message, bytes}), message + bytes);
      bytes += sizeof(protocol::Tag);
    }
    const ibv_sge frame = requests_.entry(*buffer, static_cast<uint32_t>(bytes));

    ibv_send_wr wr{};
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = frame.length <= inline_bytes_ ? IBV_SEND_INLINE : 0;
    queue_pair.chain(wr, frame, {.slice = {}, .buffer = buffer, .region = {}});
  }
}

transport::TransportRequest* RequestChannel::arrived(uint32_t buffer, uint32_t bytes) {
  transport::TransportRequest* const answered = assembly_.take({replies_.at(buffer), bytes});
  receive(buffer);
  return answered;
}

}  // namespace hbm::box::verbs::client
