// send and recv between nodes.
//
// The first message has a header and up to kFirstMessageBytes of the tensor, under the user's tag.
// So the carrier matches each send with a receive as users expect, also with a receive from any
// source. The rest of a longer tensor follows in chunks, several in flight (window.h). The chunks
// have a tag of this transfer, so that transfers with the same user tag cannot mix.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "communicator/mpi/communicator.h"
#include "communicator/mpi/pipeline.h"
#include "communicator/mpi/tuning.h"
#include "communicator/mpi/window.h"

namespace hbm::communicator::mpi {
namespace {

std::atomic<uint64_t> next_transfer{0};

// One staged message in flight.
class Message {
 public:
  Message() = default;
  Message(std::shared_ptr<Channel> channel, memory::StagingBuffer memory)
      : channel_(std::move(channel)), memory_(std::move(memory)) {}
  Message(std::shared_ptr<Channel> channel, size_t bytes)
      : Message(channel, channel->staging->acquire(bytes)) {}
  Message(Message&& other) noexcept
      : channel_(std::move(other.channel_)),
        memory_(std::move(other.memory_)),
        request_(std::exchange(other.request_, {})),
        receiving_(other.receiving_) {}
  ~Message() { abandon(); }

  std::byte* data() { return static_cast<std::byte*>(memory_.data()); }

  void send(size_t bytes, int peer, int tag) {
    receiving_ = false;
    request_ = channel_->communicator->isend(memory_.data(), bytes, peer, tag);
  }

  void receive(int peer, int tag) {
    receiving_ = true;
    request_ = channel_->communicator->irecv(memory_.data(), memory_.size(), peer, tag);
  }

  // Returns false if no message with this tag has arrived.
  bool receive_any(int tag, int& peer) {
    receiving_ = true;
    request_ = channel_->communicator->irecv_any(memory_.data(), memory_.size(), tag, peer);
    return static_cast<bool>(request_);
  }

  bool arrived() {
    return channel_->communicator->carrier().test(request_, receiving_ ? "MPI_Irecv" : "MPI_Isend");
  }

  void abandon() noexcept {
    if (!request_) return;
    if (receiving_) channel_->communicator->cancel_receive(request_);
    orphan_requests(channel_->communicator, {std::exchange(request_, {})}, std::move(memory_));
  }

 private:
  std::shared_ptr<Channel> channel_;
  memory::StagingBuffer memory_;
  Request request_;
  bool receiving_ = false;
};

// The common part of a send and a receive: the first message, then a window of chunks.
class MpiTransfer : public GroupOperation {
 public:
  MpiTransfer(std::shared_ptr<Channel> channel, const Signature& signature, size_t count, int peer)
      : GroupOperation(std::move(channel), signature, count),
        peer_(peer),
        first_(channel_, kHeaderBytes + kFirstMessageBytes) {
    observed_.staged = bytes() > 0;
    const size_t least = std::min(kLeastInFlight, chunks());
    for (size_t i = 0; i < least; ++i) {
      chunks_.emplace_back(channel_, channel_->staging->acquire(bytes_of(0)));
    }
    if (least == 0) return;
    const size_t most = std::min(rounds_in_flight(*channel_, bytes_of(0)), chunks());
    while (chunks_.size() < most) {
      memory::StagingBuffer memory = spare_memory(*channel_, bytes_of(0));
      if (!memory) break;
      chunks_.emplace_back(channel_, std::move(memory));
    }
  }

  std::vector<int> missing() const override {
    return peer_ == kAnyRank ? peers() : std::vector<int>{peer_};
  }

  void abandon() noexcept override {
    first_.abandon();
    for (Message& chunk : chunks_) chunk.abandon();
  }

 protected:
  size_t bytes() const { return count_ * element(); }
  size_t first_bytes() const { return std::min(bytes(), kFirstMessageBytes); }
  size_t chunks() const {
    const size_t rest = bytes() - first_bytes();
    return (rest + channel_->chunk_bytes - 1) / channel_->chunk_bytes;
  }
  size_t chunk_offset(size_t chunk) const { return first_bytes() + chunk * channel_->chunk_bytes; }
  size_t bytes_of(size_t chunk) const {
    return std::min(channel_->chunk_bytes, bytes() - chunk_offset(chunk));
  }
  Message& message(size_t chunk) { return chunks_[chunk % chunks_.size()]; }
  size_t in_flight() const { return chunks_.size(); }  // the most chunks

  int peer_;
  Message first_;
  bool first_done_ = false;
  size_t next_ = 0;  // the next chunk to complete

 private:
  std::vector<Message> chunks_;
};

class MpiSend final : public MpiTransfer {
 public:
  MpiSend(std::shared_ptr<Channel> channel, const Signature& signature, Source in, int to)
      : MpiTransfer(std::move(channel), signature, in.count, to),
        in_(static_cast<const std::byte*>(in.data)),
        transfer_(next_transfer.fetch_add(1, std::memory_order_relaxed)) {}

  void begin() override {
    MessageHeader header = channel_->header(signature_, count_, 0, first_bytes());
    header.transfer = transfer_;
    std::memcpy(first_.data(), &header, kHeaderBytes);
    if (first_bytes() > 0) std::memcpy(first_.data() + kHeaderBytes, in_, first_bytes());
    first_.send(kHeaderBytes + first_bytes(), peer_, signature_.root);
    for (size_t chunk = 0; chunk < in_flight(); ++chunk) post(chunk);
  }

  progress::Progress poll() override {
    progress::Progress progress = progress::Progress::kIdle;
    if (!first_done_) {
      if (!first_.arrived()) return progress::Progress::kIdle;
      first_done_ = true;
      progress = progress::Progress::kActive;
    }
    while (next_ < chunks() && message(next_).arrived()) {
      if (next_ + in_flight() < chunks()) post(next_ + in_flight());
      ++next_;
      progress = progress::Progress::kActive;
    }
    return next_ == chunks() ? progress::Progress::kDone : progress;
  }

  bool self_sufficient() const override { return chunks() == 0; }

 private:
  void post(size_t chunk) {
    std::memcpy(message(chunk).data(), in_ + chunk_offset(chunk), bytes_of(chunk));
    message(chunk).send(bytes_of(chunk), peer_, channel_->communicator->data_tag(transfer_));
  }

  const std::byte* const in_;
  const uint64_t transfer_;
};

class MpiReceive final : public MpiTransfer {
 public:
  MpiReceive(std::shared_ptr<Channel> channel, const Signature& signature, Sink out, int from,
             std::shared_ptr<int> source)
      : MpiTransfer(std::move(channel), signature, out.count, from),
        out_(static_cast<std::byte*>(out.data)),
        source_(std::move(source)) {}

  void begin() override {
    if (peer_ != kAnyRank) first_.receive(peer_, signature_.root);
  }

  progress::Progress poll() override {
    progress::Progress progress = progress::Progress::kIdle;
    if (!first_done_) {
      if (peer_ == kAnyRank && !first_.receive_any(signature_.root, peer_))
        return progress::Progress::kIdle;
      if (!first_.arrived()) return progress::Progress::kIdle;
      take_first();
      progress = progress::Progress::kActive;
    }
    while (next_ < chunks() && message(next_).arrived()) {
      std::memcpy(out_ + chunk_offset(next_), message(next_).data(), bytes_of(next_));
      if (next_ + in_flight() < chunks()) post(next_ + in_flight());
      ++next_;
      progress = progress::Progress::kActive;
    }
    return next_ == chunks() ? progress::Progress::kDone : progress;
  }

  bool self_sufficient() const override { return chunks() == 0; }

 private:
  void take_first() {
    first_done_ = true;
    *source_ = peer_;
    MessageHeader found;
    std::memcpy(&found, first_.data(), kHeaderBytes);
    check_header(found, channel_->header(signature_, count_, 0, first_bytes()), peer_,
                 channel_->group);
    if (first_bytes() > 0) std::memcpy(out_, first_.data() + kHeaderBytes, first_bytes());
    transfer_ = found.transfer;
    for (size_t chunk = 0; chunk < in_flight(); ++chunk) post(chunk);
  }

  void post(size_t chunk) {
    message(chunk).receive(peer_, channel_->communicator->data_tag(transfer_));
  }

  std::byte* const out_;
  const std::shared_ptr<int> source_;
  uint64_t transfer_ = 0;
};

}  // namespace

OperationPtr MpiCommunicator::send(Source in, Dtype dtype, int to, int tag) {
  const Signature signature{OpCode::kSendRecv, dtype, ReduceOp::kSum, tag, 0};
  return std::make_unique<MpiSend>(channel_, signature, in, to);
}

OperationPtr MpiCommunicator::receive(Sink out, Dtype dtype, int from, int tag,
                                      std::shared_ptr<int> source) {
  const Signature signature{OpCode::kSendRecv, dtype, ReduceOp::kSum, tag, 0};
  return std::make_unique<MpiReceive>(channel_, signature, out, from, std::move(source));
}

}  // namespace hbm::communicator::mpi
