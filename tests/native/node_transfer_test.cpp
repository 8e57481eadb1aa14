// Sends and receives over shared memory that do not go as planned: full mailboxes, messages that
// nobody waits for, senders that give up, receivers that refuse.
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "expect_error.h"
#include "node/mail.h"
#include "node_ranks.h"

namespace hbm::node {
namespace {

using std::chrono::milliseconds;

constexpr int kTag = 3;
constexpr int kMany = 5 * static_cast<int>(kCells);

using TicketPtr = std::shared_ptr<Ticket>;

TicketPtr send(NodeRank& rank, const std::vector<float>& data, int to, int tag = kTag) {
  return rank.transfers->enqueue(
      rank.collectives->send({data.data(), data.size()}, Dtype::kFloat32, to, tag), kPatience, {});
}

std::exception_ptr receive(NodeRank& rank, std::vector<float>& data, int from, int tag = kTag) {
  return rank.transfer(rank.collectives->receive({data.data(), data.size()}, Dtype::kFloat32, from,
                                                 tag, std::make_shared<int>(kAnyRank)));
}

std::exception_ptr end_of(NodeRank& rank, const TicketPtr& ticket) {
  rank.transfers->wait(ticket, Clock::time_point::max());
  return ticket->error();
}

TEST(NodeTransfers, OfOneTagArriveInOrderAndOfManyInAny) {
  run_node({.size = 2}, [](NodeRank& rank) {
    std::vector<std::vector<float>> messages;
    std::vector<TicketPtr> sent;
    for (int i = 0; i < kMany; ++i) messages.push_back({static_cast<float>(i)});
    std::vector<float> found(1);
    if (rank.rank == 0) {
      for (int i = 0; i < kMany; ++i) sent.push_back(send(rank, messages[i], 1));
      for (int i = 0; i < kMany; ++i) sent.push_back(send(rank, messages[i], 1, 100 + i));
      for (const TicketPtr& ticket : sent) EXPECT_FALSE(end_of(rank, ticket));
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

TEST(NodeTransfers, ThatGiveUpBeforeTheyArePostedLeaveNoGap) {
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
      const TicketPtr last = send(rank, messages[cells], 1);
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
          EXPECT_FALSE(send_it());  // it was done when it was posted
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

TEST(NodeTransfers, WithoutRoomToStageFailAlone) {
  run_node({.size = 2, .segment_bytes = 64 * 1024}, [](NodeRank& rank) {
    std::vector<float> data(50'000, 1.0f), small(10, 2.0f), found(10);
    if (rank.rank == 1) {
      EXPECT_FALSE(receive(rank, found, 0));
      EXPECT_EQ(found, small);
      return;
    }
    expect_error(ErrorKind::kExhausted, {"no room"}, [&] { send(rank, data, 1); });
    EXPECT_FALSE(end_of(rank, send(rank, small, 1)));
  });
}

}  // namespace
}  // namespace hbm::node
