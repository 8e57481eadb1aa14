// One round of messages: at most one to and one from each peer, staged in the channel's pool.
//
// The unit that every collective is made of. Slots are taken once and serve many rounds; a
// multicast is copied in once. Posting never waits. The data of a round is valid from the poll()
// that said kDone until the next open().
//
// Threads: one at a time, as Operation.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "communicator/message.h"
#include "communicator/mpi/channel.h"
#include "communicator/pieces.h"
#include "memory/staging.h"
#include "progress/operation.h"

namespace hbm::mpi {

class Round {
 public:
  // Room for `sends` different outgoing and `receives` incoming messages of up to `slot_bytes`
  // payload. Throws Error(kExhausted).
  Round(std::shared_ptr<Channel> channel, size_t sends, size_t receives, size_t slot_bytes);
  Round(Round&&) = default;
  ~Round();

  // Starts a round: forgets the one before. REQUIRES: that one is done. `tag_phase` (0 or 1) keeps
  // the rounds of an operation's two phases apart.
  void open(const Signature& signature, uint32_t part, int tag_phase);

  // A slot to fill, then post() with the payload's size and the stream's element count.
  std::byte* slot();
  void post(std::span<const int> peers, size_t bytes, uint64_t count);

  // slot(), copy, post().
  void send(std::span<const int> peers, const void* data, size_t bytes, uint64_t count);

  // The same with the bytes from `offset` on of a stream in pieces.
  void send(std::span<const int> peers, const Sources& pieces, size_t offset, size_t bytes,
            uint64_t count);

  void receive(int peer, size_t bytes, uint64_t count);

  // kDone once all messages have come and gone. Throws Error(kMismatch) or Error(kNetwork).
  Progress poll();

  // The payload that `peer` sent in this round; null if none was asked of it.
  const std::byte* payload(int peer) const;

  // Ranks of the group: those that it waits for first of all; those of messages that have not come
  // or gone; those of all its messages.
  std::vector<int> missing() const;
  std::vector<int> needed() const;
  std::vector<int> peers() const;
  void abandon() noexcept;

 private:
  struct Pending {
    int peer;
    int slot;  // of a receive, else -1
    MessageHeader expected;
  };

  void complete(size_t index, int error);
  std::byte* send_slot(size_t index);
  std::byte* receive_slot(size_t index);

  std::shared_ptr<Channel> channel_;
  size_t sends_;
  size_t stride_;
  memory::StagingBuffer memory_;
  Signature signature_{};
  uint32_t part_ = 0;
  int tag_ = 0;
  size_t used_sends_ = 0;
  size_t used_receives_ = 0;
  size_t outstanding_ = 0;
  std::vector<Request> requests_;
  std::vector<Pending> pending_;
  std::vector<int> slot_of_;  // peer -> receive slot of this round, or -1
};

}  // namespace hbm::mpi
