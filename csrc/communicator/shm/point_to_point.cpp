#include "communicator/shm/point_to_point.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "communicator/shm/doorbell_operation.h"
#include "communicator/shm/tuning.h"
#include "kernels/copy.h"

namespace hbm::communicator::shm {
namespace {

// The common part of sends and receives.
class MessageOperation : public DoorbellOperation {
 public:
  MessageOperation(std::shared_ptr<MessageMatcher> matcher, Dtype dtype, size_t count, int tag)
      : DoorbellOperation(matcher->shm_group()),
        matcher_(std::move(matcher)),
        header_(make_header({OpCode::kSendRecv, dtype, ReduceOp::kSum, tag, 0}, count, 0,
                            count * element_size(dtype))) {}

  std::string describe() const final {
    return communicator::describe(header_, rank_of(shm_group().self()), shm_group().group());
  }

  bool self_sufficient() const override { return bytes() <= Cell::kInlineBytes; }

 protected:
  size_t bytes() const { return header_.payload; }
  size_t chunk() const { return staged_chunk_bytes(bytes()); }
  size_t chunks() const { return (bytes() + chunk() - 1) / chunk(); }

  // Throws the error of a message that its other rank has given up, as `what` says. If that rank's
  // group has failed, the rank has reported the failure before, or has read the report.
  [[noreturn]] void gave_up(const std::string& what) const {
    shm_group().require_no_report();
    throw Error(ErrorKind::kPeer, what + "; see that rank's error");
  }

  const std::shared_ptr<MessageMatcher> matcher_;
  const MessageHeader header_;
};

class ShmSend final : public MessageOperation {
 public:
  ShmSend(std::shared_ptr<MessageMatcher> matcher, Source in, Dtype dtype, size_t to, int tag)
      : MessageOperation(std::move(matcher), dtype, in.count, tag),
        data_(static_cast<const std::byte*>(in.data)),
        to_(to) {}

  void begin() override {
    envelope_.header = header_;
    observed_.staged = bytes() > 0;
    if (bytes() > Cell::kInlineBytes) prepare_transfer();  // throws if the segment has no room
    position_ = matcher_->enter(to_);
    post();  // before the first chunks, so that the receiver copies them as they come
    fill();
  }

  std::vector<int> missing() const override { return {rank_of(to_)}; }

  // False if the mailbox is full: a thread has to post the envelope later.
  bool self_sufficient() const override {
    return MessageOperation::self_sufficient() && (!position_ || posted_);
  }

  void abandon() noexcept override {
    if (!posted_) {
      if (position_) matcher_->leave(to_, *position_);
      release_transfer();
    } else if (transfer_ != nullptr) {
      if (!transfer_->leave_open(MessageTransfer::kWithdrawn) && !transfer_->ended())
        cancel_taken();
      matcher_->close_when_ended(std::exchange(transfer_, nullptr));
    }
  }

  bool peers_may_write() const override { return peers_may_write_; }

 private:
  bool post() {
    posted_ = posted_ || matcher_->post(to_, *position_, envelope_, data_);
    return posted_;
  }

  progress::Progress advance() override {
    if (!post()) return progress::Progress::kIdle;
    if (transfer_ == nullptr) return progress::Progress::kDone;
    if (transfer_->ended()) return finish();
    return fill() ? progress::Progress::kActive : progress::Progress::kIdle;
  }

  progress::Progress finish() {
    const uint32_t end = transfer_->state.load(std::memory_order_relaxed);
    release_transfer();
    if (end == MessageTransfer::kDone) return progress::Progress::kDone;
    const std::string receiver =
        "rank " + std::to_string(rank_of(to_)) + " of " + shm_group().group();
    if (end == MessageTransfer::kRefused) {
      throw Error(ErrorKind::kMismatch, receiver + " refused the message of " + describe() +
                                            ": it expects another type or size");
    }
    gave_up(receiver + " gave up its receive of " + describe() +
            " before it had the whole message");
  }

  // Cancels a message that a receiver has taken. A receiver that reads the tensor continues. For a
  // receiver that waits for chunks, kNoMore makes the receive fail.
  void cancel_taken() {
    peers_may_write_ = envelope_.kind == Envelope::kZeroCopy;
    if (peers_may_write_ || filled_ == chunks()) return;
    transfer_->filled.store(kNoMore, std::memory_order_release);
    shm_group().ring_messages(to_);
  }

  void release_transfer() {
    if (transfer_ != nullptr) matcher_->close_transfer(std::exchange(transfer_, nullptr));
  }

  void prepare_transfer() {
    const auto offset = shm_group().offset_in_segment(data_, bytes());
    envelope_.kind = offset ? Envelope::kZeroCopy : Envelope::kStaged;
    transfer_ =
        matcher_->open_transfer(offset ? 0 : std::min(bytes(), kStagedChunksInFlight * chunk()));
    envelope_.transfer = *shm_group().offset_in_segment(transfer_, sizeof(MessageTransfer));
    if (offset) envelope_.message = *offset;
    observed_.zero_copy = offset.has_value();
    observed_.staged = !offset.has_value();
  }

  // Fills the free chunks. Returns true if it has filled a chunk.
  bool fill() {
    if (envelope_.kind != Envelope::kStaged) return false;
    const uint64_t before = filled_;
    const uint64_t drained = transfer_->drained.load(std::memory_order_acquire);
    auto* const staging = reinterpret_cast<std::byte*>(transfer_ + 1);
    while (filled_ < chunks() && filled_ - drained < kStagedChunksInFlight) {
      const size_t first = filled_ * chunk();
      shm_group().copy_to_peers()(staging + filled_ % kStagedChunksInFlight * chunk(),
                                  data_ + first, std::min(chunk(), bytes() - first));
      transfer_->filled.store(++filled_, std::memory_order_release);
      if (posted_) shm_group().ring_messages(to_);
    }
    return filled_ != before;
  }

  const std::byte* const data_;
  const size_t to_;
  std::optional<uint64_t> position_;  // among the sends to that rank, set in begin()
  bool posted_ = false;
  Envelope envelope_{};
  MessageTransfer* transfer_ = nullptr;  // of a message that is not inline
  uint64_t filled_ = 0;
  bool peers_may_write_ = false;
};

class ShmReceive final : public MessageOperation {
 public:
  ShmReceive(std::shared_ptr<MessageMatcher> matcher, Sink out, Dtype dtype,
             std::optional<size_t> from, int tag, std::shared_ptr<int> source)
      : MessageOperation(std::move(matcher), dtype, out.count, tag),
        out_(static_cast<std::byte*>(out.data)),
        source_(std::move(source)),
        expected_{from, tag, std::nullopt} {}

  void begin() override { matcher_->expect(expected_); }

  std::vector<int> missing() const override {
    const std::optional<size_t> from = accepted_ ? expected_.received->from : expected_.from;
    if (from) return {rank_of(*from)};
    std::vector<int> others;
    for (size_t i = 0; i < shm_group().size(); ++i) {
      if (i != shm_group().self()) others.push_back(rank_of(i));
    }
    return others;
  }

  void abandon() noexcept override {
    matcher_->forget(expected_);
    if (expected_.received && !ended_) end(MessageTransfer::kCancelled);
  }

 private:
  progress::Progress advance() override {
    matcher_->collect();
    if (!accepted_) {
      if (!matcher_->matched(expected_)) return progress::Progress::kIdle;
      accept();
      accepted_ = true;
    }
    switch (expected_.received->envelope.kind) {
      case Envelope::kInline:
        kernels::copy_bytes(out_, expected_.received->message.data(), bytes());
        return finished();
      case Envelope::kZeroCopy:
        return copy_slice();
      default:
        return drain();
    }
  }

  // Checks the message. If it is not the expected one, throws, and refuses the transfer. After this
  // call the envelope is valid.
  void accept() {
    try {
      check();
    } catch (const Error&) {
      end(MessageTransfer::kRefused);
      throw;
    }
    observed_.zero_copy = expected_.received->envelope.kind == Envelope::kZeroCopy;
    observed_.staged = !observed_.zero_copy && bytes() > 0;
  }

  void check() const {
    const ReceivedMessage& received = *expected_.received;
    const Envelope& envelope = received.envelope;
    check_header(envelope.header, header_, rank_of(received.from), shm_group().group());
    if (envelope.kind > Envelope::kStaged) spoiled("a message of kind", envelope.kind);
    if (envelope.kind == Envelope::kInline) {
      if (received.message.size() != bytes()) spoiled("an inline message of bytes:", bytes());
      return;
    }
    if (received.transfer == nullptr) spoiled("a transfer at", envelope.transfer);
    if (envelope.kind == Envelope::kZeroCopy) {
      shm_group().address_in_segment(received.from, envelope.message, bytes());
    } else {
      const size_t staging = std::min(bytes(), kStagedChunksInFlight * chunk());
      shm_group().address_in_segment(received.from, envelope.transfer,
                                     sizeof(MessageTransfer) + staging);
    }
  }

  // Copies a slice of a message in the sender's segment.
  progress::Progress copy_slice() {
    const ReceivedMessage& received = *expected_.received;
    const size_t slice = std::min(bytes() - copied_, kBytesPerPoll);
    shm_group().parallel().copy(out_ + copied_,
                                shm_group().at(received.from, received.envelope.message) + copied_,
                                slice, bytes());
    copied_ += slice;
    return copied_ == bytes() ? finished() : progress::Progress::kActive;
  }

  progress::Progress drain() {
    MessageTransfer& transfer = *expected_.received->transfer;
    const uint64_t before = drained_;
    const auto* const staging = reinterpret_cast<const std::byte*>(&transfer + 1);
    const uint64_t filled = transfer.filled.load(std::memory_order_acquire);
    if (filled == kNoMore) {
      gave_up("rank " + std::to_string(rank_of(expected_.received->from)) + " of " +
              shm_group().group() + " gave up the message of " + describe() + " half-way");
    }
    if (filled < drained_ || filled > chunks() || filled - drained_ > kStagedChunksInFlight) {
      spoiled("as chunks of its message that are there:", filled);
    }
    while (drained_ < filled) {
      const size_t first = drained_ * chunk();
      kernels::copy_part(out_ + first, staging + drained_ % kStagedChunksInFlight * chunk(),
                         std::min(chunk(), bytes() - first), bytes());
      transfer.drained.store(++drained_, std::memory_order_release);
    }
    if (drained_ == chunks()) return finished();
    if (drained_ == before) return progress::Progress::kIdle;
    shm_group().ring_messages(expected_.received->from);
    return progress::Progress::kActive;
  }

  progress::Progress finished() {
    *source_ = rank_of(expected_.received->from);
    end(MessageTransfer::kDone);
    return progress::Progress::kDone;
  }

  // Ends the transfer, if there is one. The sender may free its block after this.
  void end(MessageTransfer::TransferState how) {
    ended_ = true;
    if (expected_.received->transfer == nullptr) return;
    expected_.received->transfer->end(how);
    shm_group().ring_messages(expected_.received->from);
  }

  [[noreturn]] void spoiled(const std::string& what, uint64_t value) const {
    throw Error(ErrorKind::kMismatch, shm_group().local_rank(expected_.received->from).name +
                                          " of " + shm_group().group() + " names " + what + " " +
                                          std::to_string(value) + " in " + describe() +
                                          "; a stray store may have spoiled its shared memory");
  }

  std::byte* const out_;
  const std::shared_ptr<int> source_;
  PendingReceive expected_;  // used by the MessageMatcher until it is matched
  bool accepted_ = false;
  bool ended_ = false;
  size_t copied_ = 0;     // bytes of a zero-copy message
  uint64_t drained_ = 0;  // chunks of a staged message
};

}  // namespace

OperationPtr make_send(std::shared_ptr<MessageMatcher> matcher, Source in, Dtype dtype, size_t to,
                       int tag) {
  return std::make_unique<ShmSend>(std::move(matcher), in, dtype, to, tag);
}

OperationPtr make_receive(std::shared_ptr<MessageMatcher> matcher, Sink out, Dtype dtype,
                          std::optional<size_t> from, int tag, std::shared_ptr<int> source) {
  return std::make_unique<ShmReceive>(std::move(matcher), out, dtype, from, tag, std::move(source));
}

}  // namespace hbm::communicator::shm
