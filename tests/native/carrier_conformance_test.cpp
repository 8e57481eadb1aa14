// Tests of all carriers (communicator/carrier.h): MPI and TCP links. For a new carrier, add a value
// to Kind, and connect it in CarrierConformance::connected().
#include "communicator/carrier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "communicator/mpi/connect.h"
#include "communicator/mpi/library.h"
#include "communicator/tcp/connect.h"
#include "communicator/tcp/tuning.h"
#include "file_store.h"
#include "forked_ranks.h"
#include "mpi_ranks.h"
#include "pattern.h"
#include "seeds.h"
#include "stress.h"

namespace hbm::communicator {
namespace {

using std::chrono::steady_clock;
using Random = std::mt19937_64;

constexpr std::chrono::seconds kPatience{60};
constexpr int kDoneTag = 99;

enum class Kind { kMpi, kLinks };

// A process, and its carrier. Both communicators have all ranks, the second one in reverse order.
struct Rank {
  int rank;
  int size;
  const Carrier& carrier;
  CommHandle all;
  CommHandle reversed;

  int peer_in(CommHandle comm, int peer) const {
    return comm.value == all.value ? peer : size - 1 - peer;
  }
};

// Tests until the request is complete.
void await(const Rank& own, Request& request) {
  const auto limit = steady_clock::now() + kPatience;
  while (!own.carrier.test(request, "test")) {
    ASSERT_LT(steady_clock::now(), limit);
    std::this_thread::yield();
  }
  EXPECT_FALSE(request);
}

// Waits until all ranks have called this.
void meet(const Rank& own) {
  std::vector<Request> requests;
  char sent = 0;
  std::vector<char> got(static_cast<size_t>(own.size));
  for (int peer = 0; peer < own.size; ++peer) {
    if (peer == own.rank) continue;
    requests.push_back(own.carrier.isend(&sent, 1, peer, kDoneTag, own.all));
    requests.push_back(
        own.carrier.irecv(&got[static_cast<size_t>(peer)], 1, peer, kDoneTag, own.all));
  }
  for (Request& request : requests) await(own, request);
}

class CarrierConformance : public testing::TestWithParam<Kind> {
 protected:
  // Runs `body` on every rank, each a process of its own, and waits for all.
  static void run(int size, const std::function<void(const Rank&)>& body) {
    const auto process = [&](const ForkedRank& own) {
      connected(own, [&](const Rank& rank) {
        body(rank);
        meet(rank);
      });
    };
    if (GetParam() == Kind::kMpi) {
      mpi::run_ranks(size, process);
    } else {
      run_forked_ranks(size, process);
    }
  }

 private:
  static void connected(const ForkedRank& own, const std::function<void(const Rank&)>& body) {
    const bootstrap::Rendezvous met = bootstrap::meet(
        std::make_shared<FileStore>(own.directory), own.rank, own.size, "group t",
        steady_clock::now() + kPatience, [] { return bootstrap::introduce("test", 1); });
    std::vector<int> ranks = bootstrap::everyone(own.size);
    const std::vector<int> reversed(ranks.rbegin(), ranks.rend());
    if (GetParam() == Kind::kMpi) {
      mpi::connect(met, {});  // forms the world
      const mpi::Api& api = *mpi::library().api;
      body({own.rank, own.size, api, api.create(ranks, 1), api.create(reversed, 2)});
    } else {
      const std::shared_ptr<tcp::Links> links = tcp::connect(met, 77);
      body({own.rank, own.size, *links, links->communicator(ranks), links->communicator(reversed)});
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Carriers, CarrierConformance, testing::Values(Kind::kMpi, Kind::kLinks),
                         [](const auto& info) {
                           return info.param == Kind::kMpi ? std::string("Mpi") : "Links";
                         });

// Returns a length of any magnitude up to `most`.
size_t random_length(Random& random, size_t most) {
  const size_t limit = size_t{1} << (random() % 24);
  return random() % (std::min(limit, most) + 1);
}

void pause_sometimes(Random& random) {
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
}

struct Message {
  bool reversed;  // in which communicator
  int tag;
  uint64_t seed;
  size_t bytes;
};

std::vector<Message> draw(Random& random, size_t count, size_t most) {
  std::vector<Message> all;
  for (size_t i = 0; i < count; ++i) {
    all.push_back(
        {random() % 2 == 0, static_cast<int>(random() % 3), random(), random_length(random, most)});
  }
  return all;
}

CommHandle comm_of(const Rank& own, const Message& message) {
  return message.reversed ? own.reversed : own.all;
}

void send_all(const Rank& own, int peer, const std::vector<Message>& messages, Random random) {
  std::deque<Bytes> data;
  std::vector<Request> requests;
  for (const Message& each : messages) {
    const CommHandle comm = comm_of(own, each);
    data.push_back(pattern(each.seed, each.bytes));
    requests.push_back(
        own.carrier.isend(data.back().data(), each.bytes, own.peer_in(comm, peer), each.tag, comm));
    pause_sometimes(random);
  }
  for (Request& request : requests) await(own, request);
}

// Receives the messages, those with equal communicator and tag in order, otherwise in any order.
void receive_all(const Rank& own, int peer, const std::vector<Message>& messages, Random random) {
  std::map<std::pair<bool, int>, std::deque<Message>> queues;
  for (const Message& each : messages) queues[{each.reversed, each.tag}].push_back(each);
  struct Receive {
    Request request;
    Bytes data;
    Message expected;
  };
  std::deque<Receive> posted;
  const auto finish = [&] {
    Receive& oldest = posted.front();
    await(own, oldest.request);
    oldest.data.resize(oldest.expected.bytes);
    EXPECT_TRUE(oldest.data == pattern(oldest.expected.seed, oldest.expected.bytes));
    posted.pop_front();
  };
  while (!queues.empty()) {
    auto queue = std::next(queues.begin(), static_cast<long>(random() % queues.size()));
    const Message next = queue->second.front();
    queue->second.pop_front();
    if (queue->second.empty()) queues.erase(queue);
    const CommHandle comm = comm_of(own, next);
    posted.push_back({{}, Bytes(next.bytes + random() % 10), next});
    Receive& last = posted.back();
    last.request = own.carrier.irecv(last.data.data(), last.data.size(), own.peer_in(comm, peer),
                                     next.tag, comm);
    pause_sometimes(random);
    while (!posted.empty() && random() % 3 == 0) finish();
  }
  while (!posted.empty()) finish();
}

// Each rank has a thread for each direction of each peer.
TEST_P(CarrierConformance, MessagesOfAllSizesArriveInOrder) {
  run(3, [](const Rank& own) {
    Random random = test_random();
    const auto count = static_cast<size_t>(stress("HBM_STRESS_CARRIERS", 20));
    std::vector<std::thread> threads;
    for (int from = 0; from < own.size; ++from) {
      for (int to = 0; to < own.size; ++to) {
        const std::vector<Message> messages = draw(random, count, 8 << 20);
        if (from == to) continue;
        const Random pauses(random());
        if (from == own.rank) threads.emplace_back(send_all, own, to, messages, pauses);
        if (to == own.rank) threads.emplace_back(receive_all, own, from, messages, pauses);
      }
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST_P(CarrierConformance, AReceiveFromAnyRankTakesEachSendersMessagesInOrder) {
  run(4, [](const Rank& own) {
    constexpr size_t kMessages = 20;
    constexpr size_t kLongest = 200'000;
    Random random = test_random();
    std::vector<std::vector<Message>> messages;
    for (int rank = 0; rank < own.size; ++rank) {
      messages.push_back(draw(random, kMessages, kLongest));
      for (Message& each : messages.back()) {
        each.reversed = false;
        each.tag = 5;
      }
    }
    if (own.rank > 0) {
      send_all(own, 0, messages[static_cast<size_t>(own.rank)], random);
      return;
    }
    std::vector<size_t> next(messages.size(), 0);
    Bytes data(kLongest);
    for (size_t i = 0; i < (messages.size() - 1) * kMessages; ++i) {
      int peer = -1;
      Request request;
      const auto limit = steady_clock::now() + kPatience;
      while (!(request = own.carrier.irecv_any(data.data(), data.size(), 5, own.all, peer))) {
        ASSERT_LT(steady_clock::now(), limit);
        std::this_thread::yield();
      }
      await(own, request);
      const auto sender = static_cast<size_t>(peer);
      const Message& expected = messages[sender][next[sender]++];
      const Bytes wanted = pattern(expected.seed, expected.bytes);
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), data.begin()));
    }
  });
}

TEST_P(CarrierConformance, ManyLongMessagesWithoutAReceiveDelayNoOtherMessage) {
  run(2, [](const Rank& own) {
    constexpr size_t kBytes = 1 << 20;
    constexpr int kSends = 20;
    const Bytes data = pattern(1, kBytes);
    char small = 7;
    if (own.rank == 0) {
      std::vector<Request> sends;
      for (int i = 0; i < kSends; ++i) {
        sends.push_back(own.carrier.isend(data.data(), kBytes, 1, 0, own.all));
      }
      sends.push_back(own.carrier.isend(&small, 1, 1, 1, own.all));
      for (Request& send : sends) await(own, send);
    } else {
      small = 0;
      Request receive = own.carrier.irecv(&small, 1, 0, 1, own.all);
      await(own, receive);
      EXPECT_EQ(small, 7);
      for (int i = 0; i < kSends; ++i) {
        Bytes got(kBytes);
        receive = own.carrier.irecv(got.data(), kBytes, 0, 0, own.all);
        await(own, receive);
        EXPECT_TRUE(got == data);
      }
    }
  });
}

TEST_P(CarrierConformance, ATooLongMessageIsReportedAndTheNextOneIsWhole) {
  for (const size_t bytes :
       {size_t{100}, tcp::kEagerBytes, tcp::kEagerBytes + 1, size_t{1 << 20}}) {
    for (const bool early : {true, false}) {
      run(2, [&](const Rank& own) {
        const Bytes data = pattern(3, bytes);
        if (own.rank == 0) {
          if (early) meet(own);
          std::vector<Request> sends;
          for (int i = 0; i < 2; ++i) {
            sends.push_back(own.carrier.isend(data.data(), bytes, 1, 0, own.all));
          }
          if (!early) meet(own);
          for (Request& send : sends) await(own, send);
          return;
        }
        constexpr unsigned char kUntouched = 0xEE;
        Bytes got(bytes, kUntouched);
        std::vector<Request> receives(1);
        const auto receive = [&] {
          receives[0] = own.carrier.irecv(got.data(), bytes - 1, 0, 0, own.all);
        };
        if (early) receive();
        meet(own);
        if (!early) receive();
        std::vector<Completion> completions(1);
        const auto limit = steady_clock::now() + kPatience;
        while (own.carrier.test_some(receives, completions) == 0) {
          ASSERT_LT(steady_clock::now(), limit);
        }
        EXPECT_TRUE(own.carrier.truncated(completions[0].error));
        EXPECT_THROW(own.carrier.check(completions[0].error, "irecv"), Error);
        EXPECT_FALSE(receives[0]);
        EXPECT_EQ(got.back(), kUntouched);
        Request next = own.carrier.irecv(got.data(), bytes, 0, 0, own.all);
        await(own, next);
        EXPECT_TRUE(got == data);
      });
    }
  }
}

TEST_P(CarrierConformance, TestSomeReturnsEachCompletionOnce) {
  run(2, [](const Rank& own) {
    constexpr int kTags = 6;
    const Bytes data = pattern(4, 64);
    if (own.rank == 0) {
      for (int tag = 0; tag < kTags; tag += 2) {
        Request send = own.carrier.isend(data.data(), data.size(), 1, tag, own.all);
        await(own, send);
      }
      return;
    }
    std::vector<Bytes> got(kTags, Bytes(data.size()));
    std::vector<Request> receives;
    for (int tag = 0; tag < kTags; ++tag) {
      receives.push_back(
          own.carrier.irecv(got[static_cast<size_t>(tag)].data(), data.size(), 0, tag, own.all));
    }
    receives.push_back({});
    std::vector<int> found;
    std::vector<Completion> completions(receives.size());
    const auto limit = steady_clock::now() + kPatience;
    while (found.size() < kTags / 2) {
      ASSERT_LT(steady_clock::now(), limit);
      const size_t count = own.carrier.test_some(receives, completions);
      for (size_t i = 0; i < count; ++i) {
        EXPECT_EQ(completions[i].error, 0);
        EXPECT_EQ(got[static_cast<size_t>(completions[i].index)], data);
        found.push_back(completions[i].index);
      }
    }
    std::sort(found.begin(), found.end());
    EXPECT_EQ(found, (std::vector<int>{0, 2, 4}));
    EXPECT_EQ(own.carrier.test_some(receives, completions), 0u);
    for (Request& each : receives) {
      if (!each) continue;
      own.carrier.cancel(each);
      while (!own.carrier.test_ended(each)) ASSERT_LT(steady_clock::now(), limit);
    }
  });
}

TEST_P(CarrierConformance, ACancelledReceiveTakesNoMessageAndWritesNothing) {
  for (const size_t bytes : {size_t{10}, tcp::kEagerBytes + 1, size_t{1 << 20}}) {
    run(2, [&](const Rank& own) {
      const Bytes data = pattern(5, bytes);
      if (own.rank == 0) {
        meet(own);
        Request send = own.carrier.isend(data.data(), bytes, 1, 0, own.all);
        await(own, send);
        return;
      }
      const Bytes untouched(bytes, 0xEE);
      Bytes given_up = untouched;
      Request receive = own.carrier.irecv(given_up.data(), bytes, 0, 0, own.all);
      own.carrier.cancel(receive);
      const auto limit = steady_clock::now() + kPatience;
      while (!own.carrier.test_ended(receive)) ASSERT_LT(steady_clock::now(), limit);
      meet(own);
      Bytes got(bytes);
      receive = own.carrier.irecv(got.data(), bytes, 0, 0, own.all);
      await(own, receive);
      EXPECT_TRUE(got == data);
      EXPECT_TRUE(given_up == untouched);
    });
  }
}

TEST_P(CarrierConformance, TheHighestTagIsATag) {
  run(2, [](const Rank& own) {
    const int tag = own.carrier.highest_tag(own.all);
    EXPECT_GE(tag, 32'767);  // of MPI's standard
    EXPECT_FALSE(own.carrier.finalised());
    int value = own.rank;
    int got = -1;
    std::vector<Request> requests{
        own.carrier.isend(&value, sizeof value, 1 - own.rank, tag, own.all),
        own.carrier.irecv(&got, sizeof got, 1 - own.rank, tag, own.all),
    };
    for (Request& request : requests) await(own, request);
    EXPECT_EQ(got, 1 - own.rank);
  });
}

}  // namespace
}  // namespace hbm::communicator
