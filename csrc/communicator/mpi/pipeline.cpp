#include "communicator/mpi/pipeline.h"

#include <algorithm>
#include <utility>

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

void Pipeline::prepare(size_t parts, size_t sends, size_t receives, size_t payload_bytes) {
  parts_ = parts;
  for (size_t i = 0; i < std::min<size_t>(parts, 2); ++i) {
    rounds_.emplace_back(channel_, sends, receives, payload_bytes);
  }
}

void Pipeline::begin() {
  for (size_t part = 0; part < rounds_.size(); ++part) open(part);
}

void Pipeline::open(size_t part) {
  Round& round = rounds_[part % 2];
  round.open(signature_, static_cast<uint32_t>(part), 0);
  post(round, part);
}

progress::Progress Pipeline::poll() {
  progress::Progress progress = progress::Progress::kIdle;
  for (;;) {
    Round& round = rounds_[next_ % 2];
    const progress::Progress polled = round.poll();
    if (polled != progress::Progress::kDone)
      return polled == progress::Progress::kActive ? polled : progress;
    deliver(round, next_);
    if (next_ + 2 < parts_) open(next_ + 2);
    if (++next_ == parts_) return progress::Progress::kDone;
    progress = progress::Progress::kActive;
  }
}

void Pipeline::abandon() noexcept {
  for (Round& round : rounds_) round.abandon();
}

TwoPhase::TwoPhase(std::shared_ptr<Channel> channel, const Signature& signature, size_t count,
                   size_t reported, std::vector<int> owners, Room first, Room second)
    : GroupOperation(std::move(channel), signature, reported),
      elements_(count),
      owners_(std::move(owners)),
      block_(channel_->chunk_bytes / element() * owners_.size()),
      blocks_((count + block_ - 1) / block_) {
  const size_t longest = (std::min(block_, count) + owners_.size() - 1) / owners_.size();
  for (size_t i = 0; i < std::min<size_t>(blocks_, 2); ++i) {
    first_.emplace_back(channel_, first.sends, first.receives, longest * element());
    second_.emplace_back(channel_, second.sends, second.receives, longest * element());
  }
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

void TwoPhase::begin() {
  for (size_t block = 0; block < first_.size(); ++block) open_first(block);
}

void TwoPhase::open_first(size_t block) {
  Round& round = first_[block % 2];
  round.open(signature_, static_cast<uint32_t>(block), first_phase());
  post_first(round, block);
}

// Completes the first phase of the next block, and opens the block's second phase in the Round of
// the block two before. (awaits_first() is true only after that earlier block has finished.)
bool TwoPhase::poll_first(progress::Progress& progress) {
  if (!awaits_first()) return false;
  Round& first = first_[passed_ % 2];
  const progress::Progress polled = first.poll();
  if (polled != progress::Progress::kIdle) progress = progress::Progress::kActive;
  if (polled != progress::Progress::kDone) return false;
  Round& second = second_[passed_ % 2];
  second.open(signature_, static_cast<uint32_t>(passed_), 1);
  post_second(second, first, passed_);
  if (passed_ + 2 < blocks_) open_first(passed_ + 2);
  ++passed_;
  return true;
}

bool TwoPhase::poll_second(progress::Progress& progress) {
  if (!awaits_second()) return false;
  Round& second = second_[finished_ % 2];
  const progress::Progress polled = second.poll();
  if (polled != progress::Progress::kIdle) progress = progress::Progress::kActive;
  if (polled != progress::Progress::kDone) return false;
  deliver(second, finished_++);
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
  if (awaits_first()) ranks = first_[passed_ % 2].missing();
  if (awaits_second()) ranks = merge(std::move(ranks), second_[finished_ % 2].missing());
  return ranks;
}

// As long as blocks remain to be posted, every peer of the round is needed, also a peer whose
// messages for this block have arrived. Otherwise the death of such a peer would go unnoticed while
// the live ranks wait for each other in this block.
std::vector<int> TwoPhase::needed() const {
  const bool unposted = passed_ + 2 < blocks_;
  const auto ranks_of = [unposted](const Round& round) {
    return unposted ? round.peers() : round.needed();
  };
  std::vector<int> ranks;
  if (unposted || awaits_first()) ranks = ranks_of(first_[passed_ % 2]);
  if (awaits_second()) ranks = merge(std::move(ranks), ranks_of(second_[finished_ % 2]));
  return ranks;
}

void TwoPhase::abandon() noexcept {
  for (Round& round : first_) round.abandon();
  for (Round& round : second_) round.abandon();
}

}  // namespace hbm::communicator::mpi
