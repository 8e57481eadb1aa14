#include "communicator/shm/message_matcher.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace hbm::communicator::shm {
namespace {

// Takes the transfer of a message for its receiver. Returns false, and ends the transfer, if the
// sender has withdrawn the message.
bool take(const ReceivedMessage& received) {
  if (received.transfer == nullptr || received.transfer->leave_open(MessageTransfer::kTaken))
    return true;
  received.transfer->end(MessageTransfer::kCancelled);
  return false;
}

}  // namespace

MessageMatcher::MessageMatcher(std::shared_ptr<ShmGroup> shm_group)
    : shm_group_(std::move(shm_group)), out_(shm_group_->size()), in_(shm_group_->size()) {}

MessageMatcher::~MessageMatcher() {
  if (!fork_.in_child()) free_ended();
}

MessageTransfer* MessageMatcher::open_transfer(size_t staging) {
  {
    const std::lock_guard lock(mutex_);
    free_ended();
  }
  return new (shm_group_->allocate(sizeof(MessageTransfer) + staging)) MessageTransfer{};
}

void MessageMatcher::close_transfer(MessageTransfer* transfer) {
  shm_group_->free(reinterpret_cast<std::byte*>(transfer));
}

void MessageMatcher::close_when_ended(MessageTransfer* transfer) {
  const std::lock_guard lock(mutex_);
  cancelled_.push_back(transfer);
  free_ended();
}

void MessageMatcher::free_ended() {
  std::erase_if(cancelled_, [this](MessageTransfer* transfer) {
    const bool ended = transfer->ended();
    if (ended) close_transfer(transfer);
    return ended;
  });
}

uint64_t MessageMatcher::enter(size_t to) {
  const std::lock_guard lock(mutex_);
  return out_[to].entered++;
}

bool MessageMatcher::post(size_t to, uint64_t position, const Envelope& envelope,
                          const void* message) {
  {
    const std::lock_guard lock(mutex_);
    Outbox& box = out_[to];
    while (box.left.erase(box.turn) > 0) ++box.turn;
    if (position != box.turn) return false;
    Cell& cell = shm_group_->mailbox(shm_group_->self(), to).cells[box.posted % kCells];
    if (cell.state.load(std::memory_order_acquire) != Cell::kFree) return false;
    cell.envelope = envelope;
    if (envelope.kind == Envelope::kInline && envelope.header.payload > 0) {
      std::memcpy(cell.message.data(), message, envelope.header.payload);
    }
    cell.state.store(Cell::kPosted, std::memory_order_release);
    ++box.posted;
    ++box.turn;
  }
  shm_group_->ring_messages(to);
  shm_group_->ring_messages(shm_group_->self());  // another send of this rank may post now
  return true;
}

void MessageMatcher::leave(size_t to, uint64_t position) {
  {
    const std::lock_guard lock(mutex_);
    out_[to].left.insert(position);
  }
  shm_group_->ring_messages(shm_group_->self());  // another send of this rank may post now
}

bool MessageMatcher::matches(const PendingReceive& expected, const ReceivedMessage& received) {
  return (!expected.from || *expected.from == received.from) &&
         expected.tag == received.envelope.header.root;
}

void MessageMatcher::expect(PendingReceive& expected) {
  const std::lock_guard lock(mutex_);
  const auto matching = [&](const ReceivedMessage& received) {
    return matches(expected, received);
  };
  auto found = std::find_if(unexpected_.begin(), unexpected_.end(), matching);
  while (found != unexpected_.end() && !take(*found)) {
    found = std::find_if(unexpected_.erase(found), unexpected_.end(), matching);
  }
  if (found == unexpected_.end()) {
    expected_.push_back(&expected);
    return;
  }
  expected.received = std::move(*found);
  unexpected_.erase(found);
}

void MessageMatcher::forget(PendingReceive& expected) {
  const std::lock_guard lock(mutex_);
  expected_.remove(&expected);
}

bool MessageMatcher::matched(const PendingReceive& expected) {
  const std::lock_guard lock(mutex_);
  return expected.received.has_value();
}

void MessageMatcher::collect() {
  const std::lock_guard lock(mutex_);
  bool came = false;
  for (size_t from = 0; from < shm_group_->size(); ++from) {
    if (from == shm_group_->self()) continue;
    auto& cells = shm_group_->mailbox(from, shm_group_->self()).cells;
    for (uint64_t& taken = in_[from].taken;; ++taken) {
      Cell& cell = cells[taken % kCells];
      if (cell.state.load(std::memory_order_acquire) != Cell::kPosted) break;
      ReceivedMessage received = read(from, cell);
      cell.state.store(Cell::kFree, std::memory_order_release);
      shm_group_->ring_messages(from);
      deliver(std::move(received));
      came = true;
    }
  }
  if (came) drop_withdrawn();
}

ReceivedMessage MessageMatcher::read(size_t from, const Cell& cell) const {
  ReceivedMessage received{from, cell.envelope, {}, nullptr};
  if (received.envelope.kind == Envelope::kInline) {
    const size_t bytes = std::min<size_t>(received.envelope.header.payload, Cell::kInlineBytes);
    received.message.assign(cell.message.data(), cell.message.data() + bytes);
    return received;
  }
  const uint64_t offset = received.envelope.transfer;
  const size_t segment = shm_group_->local_rank(from).segment_bytes;
  if (offset % kCacheLine == 0 && offset < segment && segment - offset >= sizeof(MessageTransfer)) {
    received.transfer = reinterpret_cast<MessageTransfer*>(shm_group_->at(from, offset));
  }
  return received;
}

void MessageMatcher::deliver(ReceivedMessage received) {
  const auto found =
      std::find_if(expected_.begin(), expected_.end(),
                   [&](const PendingReceive* waiting) { return matches(*waiting, received); });
  if (found == expected_.end()) {
    unexpected_.push_back(std::move(received));
  } else if (take(received)) {
    (*found)->received = std::move(received);
    expected_.erase(found);
  }
}

// Ends the transfers of withdrawn messages, so that their senders can free the blocks.
void MessageMatcher::drop_withdrawn() {
  std::erase_if(unexpected_, [](const ReceivedMessage& received) {
    if (received.transfer == nullptr ||
        received.transfer->state.load(std::memory_order_acquire) != MessageTransfer::kWithdrawn) {
      return false;
    }
    received.transfer->end(MessageTransfer::kCancelled);
    return true;
  });
}

}  // namespace hbm::communicator::shm
