// Sends and receives over shared memory with errors: full mailboxes, messages without a receive,
// senders that cancel, receivers that refuse.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "communicator/shm/control_region.h"
#include "communicator/shm/tuning.h"
#include "expect_error.h"
#include "shm_ranks.h"

namespace hbm::communicator::shm {
namespace {

using std::chrono::milliseconds;

constexpr int kTag = 3;
constexpr int kMany = 5 * static_cast<int>(kCells);

using RequestPtr = std::shared_ptr<progress::Request>;

RequestPtr send(NodeRank& rank, const std::vector<float>& data, int to, int tag = kTag) {
  return rank.transfers->enqueue(
      rank.collectives->send({data.data(), data.size()}, Dtype::kFloat32, to, tag), kTimeout, {});
}

std::exception_ptr receive(NodeRank& rank, std::vector<float>& data, int from, int tag = kTag) {
  return rank.transfer(rank.collectives->receive({data.data(), data.size()}, Dtype::kFloat32, from,
                                                 tag, std::make_shared<int>(kAnyRank)));
}

std::exception_ptr end_of(NodeRank& rank, const RequestPtr& request) {
  rank.transfers->wait(request, Clock::time_point::max());
  return request->error();
}

TEST(NodeTransfers, ArriveInOrderPerTag) {
  run_node({.size = 2}, [](NodeRank& rank) {
    std::vector<std::vector<float>> messages;
    std::vector<RequestPtr> sent;
    for (int i = 0; i < kMany; ++i) messages.push_back({static_cast<float>(i)});
    std::vector<float> found(1);
    if (rank.rank == 0) {
      for (int i = 0; i < kMany; ++i) sent.push_back(send(rank, messages[i], 1));
      for (int i = 0; i < kMany; ++i) sent.push_back(send(rank, messages[i], 1, 100 + i));
      for (const RequestPtr& request : sent) EXPECT_FALSE(end_of(rank, request));
      return;
    }
    for (int i = kMany - 1; i >= 0; --i) {
      EXPECT_FALSE(receive(rank, found, 0, 100 + i));
      EXPECT_EQ(found[0], static_cast<float>(i));
    }
    for (int i = 0; i < kMany; ++i) {
      EXPECT_FALSE(receive(rank, found, 0));
      EXPECT_EQ(found[0], static_cast<float>(i));
    }
  });
}

TEST(NodeTransfers, CancelledBeforePostingLeaveNoGap) {
  for (const size_t count : {size_t{1}, size_t{100'000}}) {
    std::barrier<> gave_up(2);
    TestNode node({.size = 2});
    const size_t blocks = node.segments[0]->blocks();
    node.run([&](NodeRank& rank) {
      const auto cells = static_cast<int>(kCells);
      std::vector<float> found(1);
      if (rank.rank == 1) {
        gave_up.arrive_and_wait();
        for (int i = 0; i <= cells; ++i) {
          EXPECT_FALSE(receive(rank, found, 0));
          EXPECT_EQ(found[0], static_cast<float>(i));
        }
        return;
      }
      std::vector<std::vector<float>> messages;
      for (int i = 0; i <= cells; ++i) messages.push_back({static_cast<float>(i)});
      for (int i = 0; i < cells; ++i) send(rank, messages[i], 1);
      const std::vector<float> late(count);
      expect_error(
          ErrorKind::kTimeout, {"timed out after 20 ms", "missing ranks: 1"},
          rank.transfer(rank.collectives->send({late.data(), count}, Dtype::kFloat32, 1, kTag),
                        milliseconds(20)));
      const RequestPtr last = send(rank, messages[cells], 1);
      gave_up.arrive_and_wait();
      EXPECT_FALSE(end_of(rank, last));
    });
    EXPECT_EQ(node.segments[0]->blocks(), blocks);
  }
}

TEST(NodeTransfers, OfAnotherSizeAreRefusedAlone) {
  for (const bool in_segment : {false, true}) {
    for (const size_t count : {size_t{10}, size_t{50'000}}) {
      TestNode node({.size = 2});
      const size_t blocks = node.segments[0]->blocks();
      node.run([&](NodeRank& rank) {
        std::vector<float> shorter(count - 1), right(count);
        if (rank.rank == 1) {
          expect_error(
              ErrorKind::kMismatch,
              {"tag 3 of " + std::to_string(count - 1), "tag 3 of " + std::to_string(count)},
              receive(rank, shorter, 0));
          EXPECT_FALSE(receive(rank, right, 0));
          return;
        }
        std::byte* const block = rank.segment->allocate(count * sizeof(float));
        const void* const data = in_segment ? static_cast<const void*>(block) : right.data();
        const auto send_it = [&] {
          return rank.transfer(rank.collectives->send({data, count}, Dtype::kFloat32, 1, kTag));
        };
        if (count == 10) {
          EXPECT_FALSE(send_it());  // the send ends before the refusal: the mailbox has the data
        } else {
          expect_error(ErrorKind::kMismatch, {"rank 1", "refused the message", "tag 3"}, send_it());
        }
        EXPECT_FALSE(send_it());
        rank.segment->free(block);
      });
      EXPECT_EQ(node.segments[0]->blocks(), blocks);
    }
  }
}

// A message of `count` floats, in the rank's segment or in private memory.
class Message {
 public:
  Message(NodeRank& rank, size_t count, bool in_segment, float value)
      : segment_(rank.segment), count_(count), own_(in_segment ? 0 : count) {
    data_ = in_segment ? reinterpret_cast<float*>(segment_->allocate(count * sizeof(float)))
                       : own_.data();
    std::fill_n(data_, count, value);
  }
  ~Message() {
    if (own_.empty()) segment_->free(reinterpret_cast<std::byte*>(data_));
  }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  OperationPtr send(NodeRank& rank, int to) const {
    return rank.collectives->send({data_, count_}, Dtype::kFloat32, to, kTag);
  }

 private:
  const std::shared_ptr<TestSegment> segment_;
  const size_t count_;
  std::vector<float> own_;
  float* data_;
};

OperationPtr receive_operation(NodeRank& rank, std::vector<float>& data, int from) {
  return rank.collectives->receive({data.data(), data.size()}, Dtype::kFloat32, from, kTag,
                                   std::make_shared<int>(kAnyRank));
}

constexpr size_t kLarge = 500'000;  // floats: many chunks

// Rank 0 sends a message and cancels the send, kTimes times. Then it sends the message that rank 1
// receives. `in_segment`: the messages are in rank 0's segment. `collected`: rank 1 has read the
// mailbox before the sends are cancelled.
void expect_withdrawn(bool in_segment, bool collected) {
  constexpr int kTimes = 3;
  std::barrier<> step(2);
  TestNode node({.size = 2});
  const size_t blocks = node.segments[0]->blocks();
  node.run([&](NodeRank& rank) {
    if (rank.rank == 1) {
      std::vector<float> found(kLarge), none(1);
      if (collected) step.arrive_and_wait();
      const auto early = rank.collectives->receive({none.data(), 1}, Dtype::kFloat32, 0, kTag + 1,
                                                   std::make_shared<int>(kAnyRank));
      if (collected) {  // reads the mailbox; no receive matches the messages
        early->begin();
        early->poll();
        early->abandon();
        step.arrive_and_wait();
      }
      step.arrive_and_wait();
      EXPECT_FALSE(receive(rank, found, 0));
      EXPECT_EQ(found, std::vector<float>(kLarge, 7.0f));
      EXPECT_FALSE(receive(rank, none, 0));
      step.arrive_and_wait();
      return;
    }
    std::vector<OperationPtr> sends;
    {
      std::vector<std::unique_ptr<Message>> lost;
      for (int i = 0; i < kTimes; ++i) {
        lost.push_back(std::make_unique<Message>(rank, kLarge, in_segment, -1.0f));
        sends.push_back(lost.back()->send(rank, 1));
        sends.back()->begin();
      }
      if (collected) {
        step.arrive_and_wait();
        step.arrive_and_wait();
      }
      for (const OperationPtr& each : sends) {
        each->abandon();
        EXPECT_FALSE(each->peers_may_write());
      }
    }
    const Message kept(rank, kLarge, in_segment, 7.0f);
    step.arrive_and_wait();
    EXPECT_FALSE(rank.transfer(kept.send(rank, 1)));
    EXPECT_FALSE(end_of(rank, send(rank, {1.0f}, 1)));
    step.arrive_and_wait();
  });
  EXPECT_EQ(node.segments[0]->blocks(), blocks);
}

TEST(NodeTransfers, CancelledMessagesAreNotReceived) {
  for (const bool in_segment : {false, true}) {
    for (const bool collected : {false, true}) {
      SCOPED_TRACE(in_segment ? "zero-copy" : "staged");
      SCOPED_TRACE(collected ? "in the receiver's process" : "in the mailbox");
      expect_withdrawn(in_segment, collected);
    }
  }
}

TEST(NodeTransfers, ReleaseBlocksOfWithdrawnMessagesEarly) {
  TestNode node({.size = 2});
  NodeRank sender(node, 0), receiver(node, 1);
  const size_t blocks = node.segments[0]->blocks();
  std::vector<float> none(1);
  for (int i = 0; i < kMany; ++i) {
    const Message message(sender, kLarge, false, 1.0f);
    const OperationPtr lost = message.send(sender, 1);
    lost->begin();
    lost->abandon();
    const OperationPtr look = receive_operation(receiver, none, 0);
    look->begin();
    look->poll();
    look->abandon();
    EXPECT_LE(node.segments[0]->blocks(), blocks + 2);
  }
}

TEST(NodeTransfers, ReceivedMessagesKeepACancelledSendersTensor) {
  for (const bool in_segment : {false, true}) {
    TestNode node({.size = 2});
    const size_t blocks = node.segments[0]->blocks();
    {
      NodeRank sender(node, 0), receiver(node, 1);
      const size_t count = in_segment ? kLarge : 10 * kLarge;
      std::vector<float> found(count);
      const auto message = std::make_unique<Message>(sender, count, in_segment, 5.0f);
      const OperationPtr taking = receive_operation(receiver, found, 0);
      taking->begin();
      const OperationPtr sending = message->send(sender, 1);
      sending->begin();
      // Takes the envelope, and the available chunks of a staged message.
      const progress::Progress first = taking->poll();
      sending->abandon();
      if (in_segment) {
        EXPECT_EQ(first, progress::Progress::kDone);
        EXPECT_FALSE(sending->peers_may_write());  // the receiver has the whole message
        EXPECT_EQ(found, std::vector<float>(count, 5.0f));
        continue;
      }
      EXPECT_FALSE(sending->peers_may_write());
      expect_error(ErrorKind::kPeer, {"rank 0", "gave up the message", "tag 3"},
                   [&] { taking->poll(); });
      taking->abandon();
      std::vector<float> small(1);
      EXPECT_FALSE(end_of(sender, send(sender, small, 1)));
    }
    EXPECT_EQ(node.segments[0]->blocks(), blocks);
  }
}

TEST(NodeTransfers, ArriveInSlicesAndExposeTheTensor) {
  constexpr size_t kCount = (size_t{20} << 20) / sizeof(float);
  TestNode node({.size = 2, .segment_bytes = size_t{24} << 20});
  NodeRank sender(node, 0), receiver(node, 1);
  std::vector<float> found(kCount);
  const Message message(sender, kCount, true, 5.0f);
  const OperationPtr sending = message.send(sender, 1);
  const OperationPtr taking = receive_operation(receiver, found, 0);
  sending->begin();
  taking->begin();
  EXPECT_EQ(taking->poll(), progress::Progress::kActive);
  sending->abandon();
  EXPECT_TRUE(sending->peers_may_write());
  EXPECT_EQ(taking->poll(), progress::Progress::kDone);
  EXPECT_EQ(found, std::vector<float>(kCount, 5.0f));
}

TEST(NodeTransfers, EndImmediatelyWhenTheReceiverCancels) {
  for (const bool in_segment : {false, true}) {
    for (const bool polled : {false, true}) {
      if (in_segment && polled) continue;  // the receiver would have the whole message
      TestNode node({.size = 2});
      const size_t blocks = node.segments[0]->blocks();
      {
        NodeRank sender(node, 0), receiver(node, 1);
        std::vector<float> found(kLarge), other(1);
        const OperationPtr taking = receive_operation(receiver, found, 0);
        const OperationPtr also = receiver.collectives->receive(
            {other.data(), 1}, Dtype::kFloat32, 0, kTag + 1, std::make_shared<int>(kAnyRank));
        taking->begin();
        also->begin();
        const Message message(sender, kLarge, in_segment, 5.0f);
        const OperationPtr sending = message.send(sender, 1);
        sending->begin();
        (polled ? taking : also)->poll();  // assigns the message to `taking`
        taking->abandon();
        also->abandon();
        expect_error(ErrorKind::kPeer, {"rank 1", "gave up its receive", "tag 3"},
                     [&] { sending->poll(); });
        sending->abandon();
      }
      EXPECT_EQ(node.segments[0]->blocks(), blocks);
    }
  }
}

// A rank that gives up a message because the group has failed has read the report of the failure.
// So the error of the other rank is the report.
TEST(NodeTransfers, ErrorOfACancelledMessageIsTheFailureOfTheGroup) {
  for (const bool receiver_cancels : {false, true}) {
    TestNode node({.size = 3});
    NodeRank sender(node, 0), receiver(node, 1), third(node, 2);
    std::vector<float> found(10 * kLarge);
    const OperationPtr taking = receive_operation(receiver, found, 0);
    taking->begin();
    const Message message(sender, found.size(), false, 5.0f);
    const OperationPtr sending = message.send(sender, 1);
    sending->begin();
    EXPECT_EQ(taking->poll(), progress::Progress::kActive);
    third.shm_group->report("rank 4 has died", /*death=*/true);
    (receiver_cancels ? taking : sending)->abandon();
    const OperationPtr& other = receiver_cancels ? sending : taking;
    expect_error(ErrorKind::kDeath, {"rank 4 has died"}, [&] { other->poll(); });
    other->abandon();
  }
}

TEST(NodeTransfers, InvalidMessagesAreRefused) {
  using Spoil = std::function<void(Envelope&, MessageTransfer&)>;
  const std::vector<std::pair<std::string, Spoil>> cases = {
      {"as chunks of its message that are there: " + std::to_string(kStagedChunksInFlight + 1),
       [](Envelope&, MessageTransfer& transfer) { transfer.filled = kStagedChunksInFlight + 1; }},
      {"as chunks of its message that are there: 1000",
       [](Envelope&, MessageTransfer& transfer) { transfer.filled = 1000; }},
      {"a message of kind 7", [](Envelope& envelope, MessageTransfer&) { envelope.kind = 7; }},
      {"an inline message", [](Envelope& envelope, MessageTransfer&) { envelope.kind = 0; }},
      {"a transfer at",
       [](Envelope& envelope, MessageTransfer&) { envelope.transfer = ~uint64_t{63}; }},
      {"a transfer at", [](Envelope& envelope, MessageTransfer&) { envelope.transfer += 8; }},
      {"of its shared segment",
       [](Envelope& envelope, MessageTransfer&) {
         envelope.kind = Envelope::kZeroCopy;
         envelope.message = ~uint64_t{0};
       }},
  };
  for (const auto& [words, spoil] : cases) {
    SCOPED_TRACE(words);
    TestNode node({.size = 2});
    NodeRank sender(node, 0), receiver(node, 1);
    std::vector<float> found(kLarge);
    const Message message(sender, kLarge, false, 5.0f);
    const OperationPtr sending = message.send(sender, 1);
    sending->begin();
    Envelope& envelope = sender.shm_group->mailbox(0, 1).cells[0].envelope;
    spoil(envelope,
          *reinterpret_cast<MessageTransfer*>(sender.shm_group->at(0, envelope.transfer)));
    const OperationPtr taking = receive_operation(receiver, found, 0);
    taking->begin();
    expect_error(ErrorKind::kMismatch, {"rank 0 of the test's group", words},
                 [&] { taking->poll(); });
    taking->abandon();
    sending->abandon();
  }
}

TEST(NodeTransfers, UseLargerChunksIfLong) {
  constexpr size_t kKiB = 1024;
  for (const auto& [bytes, chunk] : std::vector<std::pair<size_t, size_t>>{
           {512 * kKiB - 4, 32 * kKiB}, {512 * kKiB, 64 * kKiB}}) {
    TestNode node({.size = 2});
    NodeRank sender(node, 0), receiver(node, 1);
    std::vector<float> data(bytes / sizeof(float)), found(data.size());
    std::iota(data.begin(), data.end(), 0.0f);
    const OperationPtr sending =
        sender.collectives->send({data.data(), data.size()}, Dtype::kFloat32, 1, kTag);
    sending->begin();
    const Envelope& envelope = sender.shm_group->mailbox(0, 1).cells[0].envelope;
    const std::byte* const transfer = sender.shm_group->at(0, envelope.transfer);
    EXPECT_EQ(reinterpret_cast<const MessageTransfer*>(transfer)->filled, kStagedChunksInFlight);
    const std::byte* const last =
        transfer + sizeof(MessageTransfer) + (kStagedChunksInFlight - 1) * chunk;
    EXPECT_EQ(
        std::memcmp(last, data.data() + (kStagedChunksInFlight - 1) * chunk / sizeof(float), kKiB),
        0);
    const OperationPtr taking = receive_operation(receiver, found, 0);
    taking->begin();
    while (taking->poll() != progress::Progress::kDone) sending->poll();
    EXPECT_EQ(sending->poll(), progress::Progress::kDone);
    EXPECT_EQ(found, data);
  }
}

TEST(NodeTransfers, WithAFullMailboxNeedAProgressThread) {
  TestNode node({.size = 2});
  NodeRank sender(node, 0), receiver(node, 1);
  std::vector<float> data(1), found(1);
  std::vector<OperationPtr> sends;
  for (size_t i = 0; i <= kCells; ++i) {
    sends.push_back(sender.collectives->send({data.data(), 1}, Dtype::kFloat32, 1, kTag));
    sends.back()->begin();
    EXPECT_EQ(sends.back()->self_sufficient(), i < kCells);
  }
  const OperationPtr taking = receive_operation(receiver, found, 0);
  taking->begin();
  EXPECT_EQ(taking->poll(), progress::Progress::kDone);
  EXPECT_EQ(sends.back()->poll(), progress::Progress::kDone);
  EXPECT_TRUE(sends.back()->self_sufficient());
}

TEST(NodeTransfers, WithoutRoomToStageFailAlone) {
  run_node({.size = 2, .segment_bytes = 64 * 1024}, [](NodeRank& rank) {
    std::vector<float> data(50'000, 1.0f), small(10, 2.0f), found(10);
    if (rank.rank == 1) {
      EXPECT_FALSE(receive(rank, found, 0));
      EXPECT_EQ(found, small);
      return;
    }
    expect_error(ErrorKind::kExhausted, {"no room"}, [&] { send(rank, data, 1); });
    // A send that could not begin, and is then cancelled, fails without failing the group, too.
    const OperationPtr late =
        rank.collectives->send({data.data(), data.size()}, Dtype::kFloat32, 1, kTag);
    expect_error(ErrorKind::kExhausted, {"no room"}, [&] { late->begin(); });
    late->abandon();
    EXPECT_FALSE(end_of(rank, send(rank, small, 1)));
  });
}

}  // namespace
}  // namespace hbm::communicator::shm
