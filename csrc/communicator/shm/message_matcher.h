// The mailboxes of a ShmGroup, as one process uses them. Posts the envelopes to one rank in the
// order in which their sends began. Matches messages with receives as MPI does. The first message
// that a rank sends with a tag goes to the first matching receive, the next message to the next.
//
// Threads: any thread may call every member. mutex_ is the only lock, and no thread waits while it
// holds mutex_.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "base/fork.h"
#include "communicator/shm/control_region.h"
#include "communicator/shm/shm_group.h"

namespace hbm::communicator::shm {

// An envelope that has arrived, with its message if the message is inline.
struct ReceivedMessage {
  size_t from;  // the sender's local rank
  Envelope envelope;
  std::vector<std::byte> message;
  // The transfer of a message that is not inline. Null for an inline message, or if the envelope's
  // offset is no valid place in the sender's segment.
  MessageTransfer* transfer;
};

// A receive that waits for its message. When `received` is set, the receiver has taken the
// message's transfer (MessageTransfer::kTaken), if the message has one.
struct PendingReceive {
  std::optional<size_t> from;  // nothing: any rank
  int tag;
  std::optional<ReceivedMessage> received;
};

class MessageMatcher {
 public:
  explicit MessageMatcher(std::shared_ptr<ShmGroup> shm_group);

  // Leaks blocks whose transfers no receiver has ended.
  ~MessageMatcher();
  MessageMatcher(const MessageMatcher&) = delete;
  MessageMatcher& operator=(const MessageMatcher&) = delete;

  const std::shared_ptr<ShmGroup>& shm_group() const noexcept { return shm_group_; }

  // Returns a new block: a MessageTransfer and `staging` bytes after it. Throws Error(kExhausted).
  MessageTransfer* open_transfer(size_t staging);
  void close_transfer(MessageTransfer* transfer);
  // Frees the block if the receiver has ended the transfer. Otherwise later calls of this function
  // and of open_transfer(), and the destructor, check again.
  void close_when_ended(MessageTransfer* transfer);

  // Queues a send to local rank `to`. Returns the send's position among the sends to that rank.
  uint64_t enter(size_t to);

  // Posts the envelope, with a copy of an inline message, if the send at `position` is next and a
  // cell is free. Returns true if the envelope was posted; the position must then not be used
  // again. leave() gives up a position without posting.
  bool post(size_t to, uint64_t position, const Envelope& envelope, const void* message);
  void leave(size_t to, uint64_t position);

  // expect() matches a receive with a message that has arrived, or else registers the receive.
  // collect() matches registered receives with messages that have arrived since. Both set
  // `received` of a matched receive. `expected` must not move before it is matched or forgotten.
  void expect(PendingReceive& expected);
  void forget(PendingReceive& expected);
  void collect();
  bool matched(const PendingReceive& expected);

 private:
  struct Outbox {
    uint64_t entered = 0;  // positions given out
    uint64_t turn = 0;     // the position that posts next
    uint64_t posted = 0;   // envelopes
    // Positions that leave() has given up, from `turn` on.
    std::set<uint64_t> left;
  };
  struct Inbox {
    uint64_t taken = 0;  // envelopes
  };

  static bool matches(const PendingReceive& expected, const ReceivedMessage& received);
  ReceivedMessage read(size_t from, const Cell& cell) const;
  void deliver(ReceivedMessage received);
  void drop_withdrawn();
  void free_ended();

  const ForkGuard fork_;
  const std::shared_ptr<ShmGroup> shm_group_;
  std::mutex mutex_;  // guards all members below
  std::vector<Outbox> out_;
  std::vector<Inbox> in_;
  std::list<PendingReceive*> expected_;     // in the order of issue
  std::deque<ReceivedMessage> unexpected_;  // in order of arrival
  // Transfers that sends of this rank have cancelled, and whose receivers may not have ended them.
  std::vector<MessageTransfer*> cancelled_;
};

}  // namespace hbm::communicator::shm
