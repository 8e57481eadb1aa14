#include "communicator/mpi/round.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "communicator/mpi/tuning.h"
#include "communicator/oversized_message.h"

namespace hbm::communicator::mpi {

Round::Round(std::shared_ptr<Channel> channel, size_t sends, size_t receives, size_t payload_bytes)
    : Round(channel, sends, payload_bytes,
            channel->size > 1
                ? channel->staging->acquire(staging_bytes(sends, receives, payload_bytes))
                : memory::StagingBuffer()) {}

Round::Round(std::shared_ptr<Channel> channel, size_t sends, size_t payload_bytes,
             memory::StagingBuffer memory)
    : channel_(std::move(channel)),
      sends_(sends),
      stride_(buffer_bytes(payload_bytes)),
      memory_(std::move(memory)),
      buffer_of_(static_cast<size_t>(channel_->size), -1) {}

Round::~Round() { abandon(); }

std::byte* Round::send_buffer(size_t index) {
  return static_cast<std::byte*>(memory_.data()) + index * stride_;
}

std::byte* Round::receive_buffer(size_t index) { return send_buffer(sends_ + index); }

void Round::open(const Signature& signature, uint32_t part, int tag_phase) {
  signature_ = signature;
  part_ = part;
  if (channel_->communicator)
    tag_ = channel_->communicator->collective_tag(channel_->tag_range, tag_phase);
  used_sends_ = used_receives_ = 0;
  requests_.clear();
  pending_.clear();
  std::fill(buffer_of_.begin(), buffer_of_.end(), -1);
}

std::byte* Round::buffer() { return send_buffer(used_sends_) + kHeaderBytes; }

void Round::post(std::span<const int> peers, size_t bytes, uint64_t count) {
  if (peers.empty()) return;
  std::byte* message = send_buffer(used_sends_++);
  const MessageHeader header = channel_->header(signature_, count, part_, bytes);
  std::memcpy(message, &header, kHeaderBytes);
  for (const int peer : peers) {
    requests_.push_back(channel_->communicator->isend(message, kHeaderBytes + bytes, peer, tag_));
    pending_.push_back({peer, -1, {}});
    ++outstanding_;
  }
}

void Round::send(std::span<const int> peers, const void* data, size_t bytes, uint64_t count) {
  if (peers.empty()) return;
  if (bytes > 0) std::memcpy(buffer(), data, bytes);
  post(peers, bytes, count);
}

void Round::send(std::span<const int> peers, const Sources& entries, size_t offset, size_t bytes,
                 uint64_t count) {
  if (peers.empty()) return;
  gather_entries(entries, element_size(signature_.operands()), offset, bytes, buffer());
  post(peers, bytes, count);
}

void Round::receive(int peer, size_t bytes, uint64_t count) {
  const size_t index = used_receives_++;
  requests_.push_back(channel_->communicator->irecv(receive_buffer(index), stride_, peer, tag_));
  pending_.push_back(
      {peer, static_cast<int>(index), channel_->header(signature_, count, part_, bytes)});
  buffer_of_[static_cast<size_t>(peer)] = static_cast<int>(index);
  ++outstanding_;
}

progress::Progress Round::poll() {
  if (outstanding_ == 0) return progress::Progress::kDone;
  std::array<Completion, kRequestsPerTest> completions;
  bool moved = false;
  for (size_t first = 0; first < requests_.size(); first += completions.size()) {
    const auto batch =
        std::span(requests_).subspan(first, std::min(completions.size(), requests_.size() - first));
    const size_t completed = channel_->communicator->carrier().test_some(batch, completions);
    for (const Completion& each : std::span(completions).first(completed)) {
      complete(first + static_cast<size_t>(each.index), each.error);
      moved = true;
    }
  }
  if (outstanding_ == 0) return progress::Progress::kDone;
  return moved ? progress::Progress::kActive : progress::Progress::kIdle;
}

void Round::complete(size_t index, int error) {
  --outstanding_;
  const Pending& pending = pending_[index];
  if (error != 0) {
    const Carrier& carrier = channel_->communicator->carrier();
    if (pending.buffer >= 0 && carrier.truncated(error)) {
      throw OversizedMessage(
          ErrorKind::kMismatch,
          "ranks disagree in " + channel_->group + ": this rank is in " +
              communicator::describe(pending.expected) + ", rank " +
              std::to_string(channel_->group_rank(pending.peer)) +
              " sent more than that: its tensor is larger, it is in another operation or "
              "names another root, or it is from an earlier group, where no rank received "
              "it");
    }
    carrier.check(error, pending.buffer >= 0 ? "MPI_Irecv" : "MPI_Isend");
  }
  if (pending.buffer < 0) return;
  MessageHeader found;
  std::memcpy(&found, receive_buffer(static_cast<size_t>(pending.buffer)), kHeaderBytes);
  check_header(found, pending.expected, channel_->group_rank(pending.peer), channel_->group);
}

const std::byte* Round::payload(int peer) const {
  const int buffer = buffer_of_[static_cast<size_t>(peer)];
  if (buffer < 0) return nullptr;
  return static_cast<const std::byte*>(memory_.data()) +
         (sends_ + static_cast<size_t>(buffer)) * stride_ + kHeaderBytes;
}

std::vector<int> Round::missing() const {
  std::vector<int> silent;
  std::vector<int> unread;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (!requests_[i]) continue;
    (pending_[i].buffer >= 0 ? silent : unread).push_back(channel_->group_rank(pending_[i].peer));
  }
  return silent.empty() ? unread : silent;
}

std::vector<int> Round::needed() const {
  std::vector<int> ranks;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i]) ranks.push_back(channel_->group_rank(pending_[i].peer));
  }
  return ranks;
}

std::vector<int> Round::peers() const {
  std::vector<int> ranks;
  for (const Pending& pending : pending_) ranks.push_back(channel_->group_rank(pending.peer));
  return ranks;
}

void Round::abandon() noexcept {
  if (outstanding_ == 0) return;
  outstanding_ = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (pending_[i].buffer >= 0) channel_->communicator->cancel_receive(requests_[i]);
  }
  orphan_requests(channel_->communicator, std::move(requests_), std::move(memory_));
}

}  // namespace hbm::communicator::mpi
