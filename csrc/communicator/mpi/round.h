// One round of messages. A rank sends at most one message to each peer, and receives at most one
// from each. The messages are staged in the channel's pool.
//
// All collectives consist of rounds. A Round allocates its buffers once, and each open() starts
// another round of messages in them. A message to several peers is copied into a buffer once.
// Posting never waits. The received data is valid from the poll() that returns kDone until the next
// open().
//
// Threads: one thread at a time, as for Operation.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "communicator/message.h"
#include "communicator/mpi/channel.h"
#include "communicator/scatter_gather.h"
#include "memory/staging.h"
#include "progress/operation.h"

namespace hbm::communicator::mpi {

class Round {
 public:
  // Allocates buffers for `sends` different outgoing and `receives` incoming messages of up to
  // `payload_bytes` payload. Throws Error(kExhausted).
  Round(std::shared_ptr<Channel> channel, size_t sends, size_t receives, size_t payload_bytes);
  // Uses `memory`, of staging_bytes() bytes.
  Round(std::shared_ptr<Channel> channel, size_t sends, size_t payload_bytes,
        memory::StagingBuffer memory);
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;
  ~Round();

  static size_t staging_bytes(size_t sends, size_t receives, size_t payload_bytes) {
    return (sends + receives) * buffer_bytes(payload_bytes);
  }

  // Starts a round, and forgets the previous one. REQUIRES: the previous round is done. `tag_phase`
  // (0 or 1) separates the rounds of an operation's two phases.
  void open(const Signature& signature, uint32_t part, int tag_phase);

  // Returns the next send buffer. post() then sends the first `bytes` bytes of this buffer to
  // `peers`. `count`: the elements of the whole transfer, for the header.
  std::byte* buffer();
  void post(std::span<const int> peers, size_t bytes, uint64_t count);

  // Copies `data` into a send buffer, and posts it.
  void send(std::span<const int> peers, const void* data, size_t bytes, uint64_t count);

  // Copies the bytes of a scatter/gather list from `offset` on into a send buffer, and posts it.
  void send(std::span<const int> peers, const Sources& entries, size_t offset, size_t bytes,
            uint64_t count);

  // Posts a receive of `bytes` payload from `peer`. `count`: as in post().
  void receive(int peer, size_t bytes, uint64_t count);

  // Returns kDone when all messages have been sent and received. Throws Error(kMismatch) or
  // Error(kNetwork).
  progress::Progress poll();

  // Returns the payload that `peer` sent in this round; null if receive() was not called for it.
  const std::byte* payload(int peer) const;

  // Return group ranks. missing(): the senders of messages that have not arrived; after all have
  // arrived, the receivers of messages that are still being sent. needed(): these senders and
  // receivers together. peers(): all peers of the round.
  std::vector<int> missing() const;
  std::vector<int> needed() const;
  std::vector<int> peers() const;
  void abandon() noexcept;

 private:
  struct Pending {
    int peer;
    int buffer;  // index of a receive buffer; -1: a send
    MessageHeader expected;
  };

  // Returns the bytes of the buffer of a message.
  static size_t buffer_bytes(size_t payload_bytes) {
    return (payload_bytes + 63) / 64 * 64 + kHeaderBytes;
  }
  void complete(size_t index, int error);
  std::byte* send_buffer(size_t index);
  std::byte* receive_buffer(size_t index);

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
  std::vector<int> buffer_of_;  // by peer: receive buffer of this round, or -1
};

}  // namespace hbm::communicator::mpi
