#include "communicator/mpi/pipeline.h"

#include <algorithm>
#include <utility>

#include "communicator/mpi/window.h"

namespace hbm::communicator::mpi {
namespace {

// Returns the ranks of both lists, each once, in ascending order.
std::vector<int> merge(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end());
  a.erase(std::unique(a.begin(), a.end()), a.end());
  return a;
}

}  // namespace

Rounds::Rounds(std::shared_ptr<Channel> channel, size_t sends, size_t receives,
               size_t payload_bytes, size_t count)
    : channel_(std::move(channel)),
      sends_(sends),
      receives_(receives),
      payload_bytes_(payload_bytes) {
  for (size_t i = 0; i < count; ++i) idle_.emplace_back(channel_, sends, receives, payload_bytes);
}

Round& Rounds::open(const Signature& signature, size_t part, int tag_phase) {
  in_flight_.splice(in_flight_.end(), idle_, idle_.begin());
  in_flight_.back().open(signature, static_cast<uint32_t>(part), tag_phase);
  if (idle_.empty()) grow();
  return in_flight_.back();
}

void Rounds::grow() {
  const size_t bytes = Round::staging_bytes(sends_, receives_, payload_bytes_);
  if (in_flight_.size() >= rounds_in_flight(*channel_, bytes)) return;
  memory::StagingBuffer memory = spare_memory(*channel_, bytes);
  if (memory) idle_.emplace_back(channel_, sends_, payload_bytes_, std::move(memory));
}

void Rounds::pop() { idle_.splice(idle_.end(), in_flight_, in_flight_.begin()); }

void Rounds::abandon() noexcept {
  for (Round& round : in_flight_) round.abandon();
}

void Pipeline::prepare(size_t parts, size_t sends, size_t receives, size_t payload_bytes) {
  parts_ = parts;
  observed_.staged = payload_bytes > 0 && sends + receives > 0;
  rounds_.emplace(channel_, sends, receives, payload_bytes, std::min(parts, kLeastInFlight));
}

void Pipeline::begin() { fill(); }

void Pipeline::fill() {
  for (; posted_ < parts_ && rounds_->ready(); ++posted_) {
    post(rounds_->open(signature_, posted_, 0), posted_);
  }
}

progress::Progress Pipeline::poll() {
  progress::Progress progress = progress::Progress::kIdle;
  for (;;) {
    Round& round = rounds_->front();
    const progress::Progress polled = round.poll();
    if (polled != progress::Progress::kDone)
      return polled == progress::Progress::kActive ? polled : progress;
    deliver(round, next_);
    rounds_->pop();
    if (++next_ == parts_) return progress::Progress::kDone;
    fill();
    progress = progress::Progress::kActive;
  }
}

std::vector<int> Pipeline::missing() const {
  return rounds_->empty() ? std::vector<int>() : rounds_->front().missing();
}

std::vector<int> Pipeline::needed() const {
  return rounds_->empty() ? std::vector<int>() : rounds_->front().needed();
}

void Pipeline::abandon() noexcept { rounds_->abandon(); }

TwoPhase::TwoPhase(std::shared_ptr<Channel> channel, const Signature& signature, size_t count,
                   size_t reported, std::vector<int> owners, Room first, Room second)
    : GroupOperation(std::move(channel), signature, reported),
      elements_(count),
      owners_(std::move(owners)),
      block_(channel_->chunk_bytes / element() * owners_.size()),
      blocks_((count + block_ - 1) / block_),
      first_(channel_, first.sends, first.receives, longest_shard() * element(),
             std::min(blocks_, kLeastInFlight)),
      second_(channel_, second.sends, second.receives, longest_shard() * element(),
              std::min(blocks_, kLeastInFlight)) {
  observed_.staged = count > 0;
}

size_t TwoPhase::longest_shard() const {
  return (std::min(block_, elements_) + owners_.size() - 1) / owners_.size();
}

bool TwoPhase::owns(int rank) const {
  return std::binary_search(owners_.begin(), owners_.end(), rank);
}

std::vector<int> TwoPhase::other_owners() const {
  std::vector<int> others = peers();
  std::erase_if(others, [this](int peer) { return !owns(peer); });
  return others;
}

ElementRange TwoPhase::shard(size_t block, int owner) const {
  const auto index = static_cast<size_t>(std::lower_bound(owners_.begin(), owners_.end(), owner) -
                                         owners_.begin());
  const size_t start = block * block_;
  const size_t count = std::min(block_, elements_ - start);
  const size_t each = count / owners_.size();
  const size_t longer = count % owners_.size();
  return {start + index * each + std::min(index, longer), each + (index < longer ? 1 : 0)};
}

void TwoPhase::begin() { fill(); }

void TwoPhase::fill() {
  for (; opened_ < blocks_ && first_.ready(); ++opened_) {
    post_first(first_.open(signature_, opened_, first_phase()), opened_);
  }
}

// Completes the first phase of the next block, and opens the block's second phase.
bool TwoPhase::poll_first(progress::Progress& progress) {
  if (!awaits_first()) return false;
  Round& first = first_.front();
  const progress::Progress polled = first.poll();
  if (polled != progress::Progress::kIdle) progress = progress::Progress::kActive;
  if (polled != progress::Progress::kDone) return false;
  post_second(second_.open(signature_, passed_, 1), first, passed_);
  first_.pop();
  ++passed_;
  fill();
  return true;
}

bool TwoPhase::poll_second(progress::Progress& progress) {
  if (!awaits_second()) return false;
  Round& second = second_.front();
  const progress::Progress polled = second.poll();
  if (polled != progress::Progress::kIdle) progress = progress::Progress::kActive;
  if (polled != progress::Progress::kDone) return false;
  deliver(second, finished_++);
  second_.pop();
  return true;
}

progress::Progress TwoPhase::poll() {
  progress::Progress progress = progress::Progress::kIdle;
  for (bool again = true; again;) {
    again = poll_first(progress);
    again = poll_second(progress) || again;
    if (finished_ == blocks_) return progress::Progress::kDone;
  }
  return progress;
}

// Returns the ranks of the rounds that poll() tests. The arrivals in other rounds are not known
// yet.
std::vector<int> TwoPhase::missing() const {
  std::vector<int> ranks;
  if (awaits_first()) ranks = first_.front().missing();
  if (awaits_second()) ranks = merge(std::move(ranks), second_.front().missing());
  return ranks;
}

// As long as blocks remain to be posted, every peer of the round is needed, also a peer whose
// messages for this block have arrived. Otherwise the death of such a peer would go unnoticed while
// the live ranks wait for each other in this block.
std::vector<int> TwoPhase::needed() const {
  const bool unposted = opened_ < blocks_;
  const auto ranks_of = [unposted](const Round& round) {
    return unposted ? round.peers() : round.needed();
  };
  std::vector<int> ranks;
  if (!first_.empty()) ranks = ranks_of(first_.front());
  if (awaits_second()) ranks = merge(std::move(ranks), ranks_of(second_.front()));
  return ranks;
}

void TwoPhase::abandon() noexcept {
  first_.abandon();
  second_.abandon();
}

}  // namespace hbm::communicator::mpi
