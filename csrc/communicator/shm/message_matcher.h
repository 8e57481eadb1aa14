// This process' end of the mailboxes of a ShmGroup: posts envelopes in the order of issue, and
// matches those that come with receives, as MPI does: of the messages from one rank with one tag,
// the first sent goes to the first receive that asked for it.
//
// Threads: any. mutex_ is the only lock, and nothing waits under it.
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
#include "communicator/shm/area.h"
#include "communicator/shm/shm_group.h"

namespace hbm::shm {

// An envelope that has come, with its message if that is small.
struct ReceivedMessage {
  size_t from;  // index of the member
  Envelope envelope;
  std::vector<std::byte> message;
  MessageTransfer* transfer;  // of a large message; null if it does not lie in the sender's segment
};

// A receive that waits for its message. A large message has been taken (MessageTransfer::kTaken)
// when it is here.
struct PendingReceive {
  std::optional<size_t> from;  // nothing: any member
  int tag;
  std::optional<ReceivedMessage> received;
};

class MessageMatcher {
 public:
  explicit MessageMatcher(std::shared_ptr<ShmGroup> shm_group);

  // Blocks that no receiver has ended by now stay until the process ends.
  ~MessageMatcher();
  MessageMatcher(const MessageMatcher&) = delete;
  MessageMatcher& operator=(const MessageMatcher&) = delete;

  const std::shared_ptr<ShmGroup>& shm_group() const noexcept { return shm_group_; }

  // A block for a large message, with `staging` bytes behind the MessageTransfer. Throws
  // Error(kExhausted).
  MessageTransfer* open_transfer(size_t staging);
  void close_transfer(MessageTransfer* transfer);
  // The same, once the receiver has ended it.
  void close_when_ended(MessageTransfer* transfer);

  // A send's place among those to the same member.
  uint64_t enter(size_t to);

  // Posts the envelope if it is this send's turn and there is a free cell. An inline message is
  // copied. Gives up the place on success.
  bool post(size_t to, uint64_t place, const Envelope& envelope, const void* message);
  void leave(size_t to, uint64_t place);

  // Matches `expected`, now or when its message comes: collect() then fills it in. It must stay
  // where it is until then, or until forget().
  void expect(PendingReceive& expected);
  void forget(PendingReceive& expected);
  void collect();
  bool matched(const PendingReceive& expected);

 private:
  struct Outbox {
    uint64_t entered = 0;  // places given
    uint64_t turn = 0;     // the place that posts next
    uint64_t posted = 0;   // envelopes
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
  std::mutex mutex_;  // guards the members below
  std::vector<Outbox> out_;
  std::vector<Inbox> in_;
  std::list<PendingReceive*> expected_;     // in the order of issue
  std::deque<ReceivedMessage> unexpected_;  // in the order in which they came
  std::vector<MessageTransfer*> given_up_;  // by sends of this rank, maybe not yet ended
};

}  // namespace hbm::shm
