#include "node/post.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hbm::node {

Post::Post(std::shared_ptr<Team> team)
    : team_(std::move(team)), out_(team_->size()), in_(team_->size()) {}

uint64_t Post::enter(size_t to) {
  const std::lock_guard lock(mutex_);
  return out_[to].entered++;
}

bool Post::post(size_t to, uint64_t place, const Envelope& envelope, const void* message) {
  {
    const std::lock_guard lock(mutex_);
    Outbox& box = out_[to];
    while (box.left.erase(box.turn) > 0) ++box.turn;
    if (place != box.turn) return false;
    Cell& cell = team_->mailbox(team_->self(), to).cells[box.posted % kCells];
    if (cell.state.load(std::memory_order_acquire) != Cell::kFree) return false;
    cell.envelope = envelope;
    if (envelope.kind == Envelope::kInline && envelope.header.payload > 0) {
      std::memcpy(cell.message.data(), message, envelope.header.payload);
    }
    cell.state.store(Cell::kPosted, std::memory_order_release);
    ++box.posted;
    ++box.turn;
  }
  team_->ring_transfers(to);
  team_->ring_transfers(team_->self());  // it may be another send's turn
  return true;
}

void Post::leave(size_t to, uint64_t place) {
  {
    const std::lock_guard lock(mutex_);
    out_[to].left.insert(place);
  }
  team_->ring_transfers(team_->self());  // it may be another send's turn
}

bool Post::matches(const Expected& expected, const Letter& letter) {
  return (!expected.from || *expected.from == letter.from) &&
         expected.tag == letter.envelope.header.root;
}

void Post::expect(Expected& expected) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(unexpected_.begin(), unexpected_.end(),
                                  [&](const Letter& letter) { return matches(expected, letter); });
  if (found == unexpected_.end()) {
    expected_.push_back(&expected);
    return;
  }
  expected.letter = std::move(*found);
  unexpected_.erase(found);
}

void Post::forget(Expected& expected) {
  const std::lock_guard lock(mutex_);
  expected_.remove(&expected);
}

bool Post::matched(const Expected& expected) {
  const std::lock_guard lock(mutex_);
  return expected.letter.has_value();
}

void Post::collect() {
  const std::lock_guard lock(mutex_);
  for (size_t from = 0; from < team_->size(); ++from) {
    if (from == team_->self()) continue;
    auto& cells = team_->mailbox(from, team_->self()).cells;
    for (uint64_t& taken = in_[from].taken;; ++taken) {
      Cell& cell = cells[taken % kCells];
      if (cell.state.load(std::memory_order_acquire) != Cell::kPosted) break;
      Letter letter{from, cell.envelope, {}};
      if (letter.envelope.kind == Envelope::kInline) {
        const size_t bytes = std::min<size_t>(letter.envelope.header.payload, Cell::kInlineBytes);
        letter.message.assign(cell.message.data(), cell.message.data() + bytes);
      }
      cell.state.store(Cell::kFree, std::memory_order_release);
      team_->ring_transfers(from);
      const auto found =
          std::find_if(expected_.begin(), expected_.end(),
                       [&](const Expected* waiting) { return matches(*waiting, letter); });
      if (found == expected_.end()) {
        unexpected_.push_back(std::move(letter));
      } else {
        (*found)->letter = std::move(letter);
        expected_.erase(found);
      }
    }
  }
}

}  // namespace hbm::node
