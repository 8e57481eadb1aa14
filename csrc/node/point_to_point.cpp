#include "node/point_to_point.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/error.h"
#include "reduce/copy.h"

namespace hbm::node {
namespace {

constexpr size_t kChunkBytes = 128 * 1024;
constexpr size_t kChunks = 2;                        // of a staged message, in flight
constexpr std::chrono::milliseconds kLookEvery{10};  // whether the peer is alive

// What sends and receives have in common.
class TransferOperation : public Operation {
 public:
  TransferOperation(std::shared_ptr<Post> post, Dtype dtype, size_t count, int tag)
      : post_(std::move(post)),
        header_(make_header({OpCode::kSendRecv, dtype, ReduceOp::kSum, tag, 0}, count, 0,
                            count * element_size(dtype))) {}

  std::string describe() const final {
    return hbm::describe(header_) + " on rank " + std::to_string(rank_of(team().self())) + " of " +
           team().group();
  }

  Progress poll() final {
    seen_ = team().transfer_rings();
    const Progress progress = advance();
    if (progress == Progress::kIdle) look_after_peers();
    return progress;
  }

  bool doze(Clock::time_point until) final {
    team().sleep_transfers(until, seen_);
    return true;
  }

  bool self_sufficient() const final { return bytes() <= Cell::kInlineBytes; }

 protected:
  virtual Progress advance() = 0;

  Team& team() const { return *post_->team(); }
  int rank_of(size_t member) const { return team().member(member).rank; }
  size_t bytes() const { return header_.payload; }

  const std::shared_ptr<Post> post_;
  const MessageHeader header_;

 private:
  // In poll(), because of all the transfers under way only one dozes.
  void look_after_peers() {
    const Clock::time_point now = Clock::now();
    if (!team().failed() && now < look_due_) return;
    // What a rank that is dead by now has sent is there; the next poll() will find it.
    team().require_alive(missing(), *this, [this] { return team().transfer_rings() != seen_; });
    look_due_ = now + kLookEvery;
  }

  uint32_t seen_ = 0;
  Clock::time_point look_due_ = Clock::now() + kLookEvery;
};

class Send final : public TransferOperation {
 public:
  Send(std::shared_ptr<Post> post, Source in, Dtype dtype, size_t to, int tag)
      : TransferOperation(std::move(post), dtype, in.count, tag),
        data_(static_cast<const std::byte*>(in.data)),
        to_(to) {}

  void begin() override {
    envelope_.header = header_;
    if (bytes() > Cell::kInlineBytes) prepare_transfer();  // throws if there is no room for it
    place_ = post_->enter(to_);
    post();
  }

  std::vector<int> missing() const override { return {rank_of(to_)}; }

  // Once posted, the receiver may still look at the block, so it is not given back.
  void abandon() noexcept override {
    if (posted_) return;
    post_->leave(to_, place_);
    give_back();
  }

 private:
  bool post() {
    posted_ = posted_ || post_->post(to_, place_, envelope_, data_);
    return posted_;
  }

  Progress advance() override {
    if (!post()) return Progress::kIdle;
    if (transfer_ == nullptr) return Progress::kDone;
    const uint64_t drained = transfer_->drained.load(std::memory_order_acquire);
    if (drained == kRefused) {
      give_back();
      throw Error(ErrorKind::kMismatch, "rank " + std::to_string(rank_of(to_)) + " of " +
                                            team().group() + " refused the message of " +
                                            describe() + ": it expects another type or size");
    }
    if (drained == chunks()) {
      give_back();
      return Progress::kDone;
    }
    if (!fill(drained)) return Progress::kIdle;
    team().ring_transfers(to_);
    return Progress::kActive;
  }

  void give_back() {
    if (transfer_ != nullptr) team().free(reinterpret_cast<std::byte*>(transfer_));
    transfer_ = nullptr;
  }

  void prepare_transfer() {
    const auto direct = team().offset_in_segment(data_, bytes());
    envelope_.kind = direct ? Envelope::kDirect : Envelope::kStaged;
    std::byte* block =
        team().allocate(sizeof(Transfer) + (direct ? 0 : std::min(bytes(), kChunks * kChunkBytes)));
    transfer_ = new (block) Transfer{};
    envelope_.transfer = *team().offset_in_segment(block, sizeof(Transfer));
    envelope_.chunk = kChunkBytes;
    if (direct) {
      envelope_.message = *direct;
    } else {
      fill(0);
    }
  }

  size_t chunks() const {
    return envelope_.kind == Envelope::kDirect ? 1 : (bytes() + kChunkBytes - 1) / kChunkBytes;
  }

  // Puts in what there is room for; false if there was none.
  bool fill(uint64_t drained) {
    if (envelope_.kind == Envelope::kDirect) return false;
    const uint64_t before = filled_;
    auto* const staging = reinterpret_cast<std::byte*>(transfer_ + 1);
    while (filled_ < chunks() && filled_ - drained < kChunks) {
      const size_t first = filled_ * kChunkBytes;
      copy_bytes(staging + filled_ % kChunks * kChunkBytes, data_ + first,
                 std::min(kChunkBytes, bytes() - first));
      transfer_->filled.store(++filled_, std::memory_order_release);
    }
    return filled_ != before;
  }

  const std::byte* const data_;
  const size_t to_;
  uint64_t place_ = 0;
  bool posted_ = false;
  Envelope envelope_{};
  Transfer* transfer_ = nullptr;  // of a large message
  uint64_t filled_ = 0;
};

class Receive final : public TransferOperation {
 public:
  Receive(std::shared_ptr<Post> post, Sink out, Dtype dtype, std::optional<size_t> from, int tag,
          std::shared_ptr<int> source)
      : TransferOperation(std::move(post), dtype, out.count, tag),
        out_(static_cast<std::byte*>(out.data)),
        source_(std::move(source)),
        expected_{from, tag, std::nullopt} {}

  void begin() override { post_->expect(expected_); }

  std::vector<int> missing() const override {
    const std::optional<size_t> from = matched_ ? expected_.letter->from : expected_.from;
    if (from) return {rank_of(*from)};
    std::vector<int> others;
    for (size_t i = 0; i < team().size(); ++i) {
      if (i != team().self()) others.push_back(rank_of(i));
    }
    return others;
  }

  void abandon() noexcept override {
    if (!matched_) post_->forget(expected_);
  }

 private:
  Progress advance() override {
    post_->collect();
    if (!matched_) {
      if (!post_->matched(expected_)) return Progress::kIdle;
      matched_ = true;
      accept();
    }
    const Letter& letter = *expected_.letter;
    if (letter.envelope.kind == Envelope::kInline) {
      copy_bytes(out_, letter.message.data(), letter.message.size());
      return finished();
    }
    if (letter.envelope.kind == Envelope::kDirect) {
      copy_bytes(out_, team().direct(letter.from, {0, letter.envelope.message, 0, 0}, bytes()),
                 bytes());
      transfer().drained.store(1, std::memory_order_release);
      team().ring_transfers(letter.from);
      return finished();
    }
    return drain(letter);
  }

  // Throws, and tells the sender of a large message, if the letter is not what was expected.
  void accept() {
    const Letter& letter = *expected_.letter;
    try {
      check_header(letter.envelope.header, header_, rank_of(letter.from), team().group());
    } catch (const Error&) {
      if (letter.envelope.kind != Envelope::kInline) {
        transfer().drained.store(kRefused, std::memory_order_release);
        team().ring_transfers(letter.from);
      }
      throw;
    }
  }

  Progress drain(const Letter& letter) {
    const size_t chunk = letter.envelope.chunk;
    const uint64_t before = drained_;
    const auto* const staging = reinterpret_cast<const std::byte*>(&transfer() + 1);
    const uint64_t filled = transfer().filled.load(std::memory_order_acquire);
    while (drained_ < filled) {
      const size_t first = drained_ * chunk;
      copy_bytes(out_ + first, staging + drained_ % kChunks * chunk,
                 std::min(chunk, bytes() - first));
      transfer().drained.store(++drained_, std::memory_order_release);
    }
    if (drained_ == before) return Progress::kIdle;
    team().ring_transfers(letter.from);
    return drained_ * chunk >= bytes() ? finished() : Progress::kActive;
  }

  Transfer& transfer() const {
    const Letter& letter = *expected_.letter;
    return *reinterpret_cast<Transfer*>(
        team().direct(letter.from, {0, letter.envelope.transfer, 0, 0}, sizeof(Transfer)));
  }

  Progress finished() {
    *source_ = rank_of(expected_.letter->from);
    return Progress::kDone;
  }

  std::byte* const out_;
  const std::shared_ptr<int> source_;
  Expected expected_;  // Post's until it is matched
  bool matched_ = false;
  uint64_t drained_ = 0;
};

}  // namespace

OperationPtr make_send(std::shared_ptr<Post> post, Source in, Dtype dtype, size_t to, int tag) {
  return std::make_unique<Send>(std::move(post), in, dtype, to, tag);
}

OperationPtr make_receive(std::shared_ptr<Post> post, Sink out, Dtype dtype,
                          std::optional<size_t> from, int tag, std::shared_ptr<int> source) {
  return std::make_unique<Receive>(std::move(post), out, dtype, from, tag, std::move(source));
}

}  // namespace hbm::node
