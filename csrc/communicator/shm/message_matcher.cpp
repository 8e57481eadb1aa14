#include "communicator/shm/message_matcher.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace hbm::node {
namespace {

// True if the receiver may have the letter's message. Ends the transfer of one that was withdrawn.
bool take(const Letter& letter) {
  if (letter.transfer == nullptr || letter.transfer->leave_open(Transfer::kTaken)) return true;
  letter.transfer->end(Transfer::kGivenUp);
  return false;
}

}  // namespace

Post::Post(std::shared_ptr<Team> team)
    : team_(std::move(team)), out_(team_->size()), in_(team_->size()) {}

Post::~Post() {
  if (!fork_.in_child()) free_ended();
}

Transfer* Post::open_transfer(size_t staging) {
  {
    const std::lock_guard lock(mutex_);
    free_ended();
  }
  return new (team_->allocate(sizeof(Transfer) + staging)) Transfer{};
}

void Post::close_transfer(Transfer* transfer) {
  team_->free(reinterpret_cast<std::byte*>(transfer));
}

void Post::close_when_ended(Transfer* transfer) {
  const std::lock_guard lock(mutex_);
  given_up_.push_back(transfer);
  free_ended();
}

void Post::free_ended() {
  std::erase_if(given_up_, [this](Transfer* transfer) {
    const bool ended = transfer->ended();
    if (ended) close_transfer(transfer);
    return ended;
  });
}

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
  const auto matching = [&](const Letter& letter) { return matches(expected, letter); };
  auto found = std::find_if(unexpected_.begin(), unexpected_.end(), matching);
  while (found != unexpected_.end() && !take(*found)) {
    found = std::find_if(unexpected_.erase(found), unexpected_.end(), matching);
  }
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
  bool came = false;
  for (size_t from = 0; from < team_->size(); ++from) {
    if (from == team_->self()) continue;
    auto& cells = team_->mailbox(from, team_->self()).cells;
    for (uint64_t& taken = in_[from].taken;; ++taken) {
      Cell& cell = cells[taken % kCells];
      if (cell.state.load(std::memory_order_acquire) != Cell::kPosted) break;
      Letter letter = read(from, cell);
      cell.state.store(Cell::kFree, std::memory_order_release);
      team_->ring_transfers(from);
      deliver(std::move(letter));
      came = true;
    }
  }
  if (came) drop_withdrawn();
}

Letter Post::read(size_t from, const Cell& cell) const {
  Letter letter{from, cell.envelope, {}, nullptr};
  if (letter.envelope.kind == Envelope::kInline) {
    const size_t bytes = std::min<size_t>(letter.envelope.header.payload, Cell::kInlineBytes);
    letter.message.assign(cell.message.data(), cell.message.data() + bytes);
    return letter;
  }
  const uint64_t offset = letter.envelope.transfer;
  const size_t segment = team_->member(from).segment_bytes;
  if (offset % kCacheLine == 0 && offset < segment && segment - offset >= sizeof(Transfer)) {
    letter.transfer = reinterpret_cast<Transfer*>(team_->at(from, offset));
  }
  return letter;
}

void Post::deliver(Letter letter) {
  const auto found = std::find_if(expected_.begin(), expected_.end(), [&](const Expected* waiting) {
    return matches(*waiting, letter);
  });
  if (found == expected_.end()) {
    unexpected_.push_back(std::move(letter));
  } else if (take(letter)) {
    (*found)->letter = std::move(letter);
    expected_.erase(found);
  }
}

// So that their senders can give the blocks back.
void Post::drop_withdrawn() {
  std::erase_if(unexpected_, [](const Letter& letter) {
    if (letter.transfer == nullptr ||
        letter.transfer->state.load(std::memory_order_acquire) != Transfer::kWithdrawn) {
      return false;
    }
    letter.transfer->end(Transfer::kGivenUp);
    return true;
  });
}

}  // namespace hbm::node
