// Tests of TCP links beyond carrier_conformance_test.cpp: long and short messages, cancelled ones,
// dead peers, frames that are not hbm's, and the connecting of a group's ranks.
#include "communicator/tcp/links.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/tcp.h"
#include "communicator/tcp/connect.h"
#include "communicator/tcp/tuning.h"
#include "expect_error.h"
#include "file_store.h"
#include "forked_ranks.h"
#include "pattern.h"
#include "scratch.h"
#include "seeds.h"

namespace hbm::communicator::tcp {
namespace {

using std::chrono::steady_clock;
using Random = std::mt19937_64;

constexpr std::chrono::seconds kPatience{60};
constexpr CommHandle kAll{1};
constexpr CommHandle kReversed{2};

std::pair<Descriptor, Descriptor> connected_pair() {
  uint16_t port = 0;
  const Descriptor listener = listen_on_all_addresses(port);
  Descriptor ours = start_to_connect("127.0.0.1", port);
  pollfd waiting{listener.get(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, -1), 1);
  Descriptor theirs(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  EXPECT_TRUE(ours && theirs);
  return {std::move(ours), std::move(theirs)};
}

// The sockets of each rank, by rank.
using Mesh = std::vector<std::vector<Descriptor>>;

Mesh make_mesh(size_t size) {
  Mesh mesh(size);
  for (auto& row : mesh) row.resize(size);
  for (size_t a = 0; a < size; ++a) {
    for (size_t b = a + 1; b < size; ++b) std::tie(mesh[a][b], mesh[b][a]) = connected_pair();
  }
  return mesh;
}

// Makes two communicators: of all ranks, and of all ranks in reverse
// order.
void add_communicators(Links& links, size_t size) {
  std::vector<int> ranks(size);
  for (size_t i = 0; i < size; ++i) ranks[i] = static_cast<int>(i);
  EXPECT_EQ(links.communicator(ranks).value, kAll.value);
  std::reverse(ranks.begin(), ranks.end());
  EXPECT_EQ(links.communicator(ranks).value, kReversed.value);
}

std::unique_ptr<Links> links_of(std::vector<Descriptor> sockets) {
  const size_t size = sockets.size();
  auto links = std::make_unique<Links>(std::move(sockets), "group t");
  add_communicators(*links, size);
  return links;
}

std::vector<std::unique_ptr<Links>> make_links(size_t size) {
  std::vector<std::unique_ptr<Links>> all;
  for (auto& sockets : make_mesh(size)) all.push_back(links_of(std::move(sockets)));
  return all;
}

bootstrap::Rendezvous meet(const std::filesystem::path& directory, int rank, int size,
                           std::chrono::milliseconds patience = kPatience) {
  return bootstrap::meet(std::make_shared<FileStore>(directory), rank, size, "group t",
                         steady_clock::now() + patience,
                         [] { return bootstrap::introduce("test", 1); });
}

// Tests until the request is complete. A sleep on the links' descriptor must suffice.
void await(const Links& links, Request& request) {
  const auto limit = steady_clock::now() + kPatience;
  while (!links.test(request, "")) {
    ASSERT_LT(steady_clock::now(), limit);
    pollfd waiting{links.poll(), POLLIN, 0};
    poll(&waiting, 1, 1000);
  }
}

// Tests until the request has ended. Returns its error's text.
std::string end_of(const Links& links, Request& request) {
  try {
    await(links, request);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kNetwork);
    return error.what();
  }
  return "no error";
}

void progress(const Links& links) {
  char byte = 0;
  int peer = 0;
  EXPECT_FALSE(links.irecv_any(&byte, 1, 999, kAll, peer));
}

TEST(Links, ALongMessageWithoutAReceiveTakesNoMemoryAndDoesNotBlock) {
  const auto links = make_links(2);
  const Bytes data = pattern(1, 8 << 20);
  std::vector<Request> sends;
  for (int i = 0; i < 50; ++i) {
    sends.push_back(links[0]->isend(data.data(), data.size(), 1, 0, kAll));
  }
  const Bytes small = pattern(2, 100);
  Request later = links[0]->isend(small.data(), small.size(), 1, 1, kAll);
  Bytes got(100);
  Request receive = links[1]->irecv(got.data(), got.size(), 0, 1, kAll);
  await(*links[1], receive);
  await(*links[0], later);
  EXPECT_EQ(got, small);
  for (Request& send : sends) EXPECT_FALSE(links[0]->test_ended(send));
}

// A rank's links to a peer that is a bare socket.
class BarePeer {
 public:
  BarePeer() {
    auto [ours, theirs] = connected_pair();
    std::vector<Descriptor> sockets(2);
    sockets[1] = std::move(ours);
    links = links_of(std::move(sockets));
    socket = std::move(theirs);
  }

  void write(const void* data, size_t bytes) const {
    const auto* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t sent = send(socket.get(), at, bytes, MSG_NOSIGNAL);
      if (sent < 0 && errno == EAGAIN) {
        progress_links();
        continue;
      }
      if (sent < 0) return;  // the links have been closed
      at += sent;
      bytes -= static_cast<size_t>(sent);
    }
  }
  void write(FrameKind kind, int tag, uint64_t bytes, uint64_t id) const {
    const FrameHeader header{kFrameMagic, kind, 1, 0, tag, 0, bytes, id};
    write(&header, sizeof header);
  }
  void read(void* data, size_t bytes) const {
    auto* at = static_cast<char*>(data);
    const auto limit = steady_clock::now() + kPatience;
    while (bytes > 0) {
      ASSERT_LT(steady_clock::now(), limit);
      const ssize_t got = recv(socket.get(), at, bytes, 0);
      if (got < 0 && errno == EAGAIN) {
        progress_links();
        continue;
      }
      ASSERT_GT(got, 0);
      at += got;
      bytes -= static_cast<size_t>(got);
    }
  }
  FrameHeader read_header() const {
    FrameHeader header;
    read(&header, sizeof header);
    return header;
  }
  void progress_links() const {
    char byte = 0;
    int peer = 0;
    links->irecv_any(&byte, 1, 999, kReversed, peer);
  }
  // Lets the links read until they have nothing left to read.
  void settle() const {
    pollfd waiting{links->poll(), POLLIN, 0};
    while (poll(&waiting, 1, 20) == 1) progress_links();
  }

  std::unique_ptr<Links> links;
  Descriptor socket;
};

TEST(Links, AReceiveCancelledWithinItsMessageIsNotTouchedAnyMore) {
  for (const bool is_long : {false, true}) {
    const BarePeer peer;
    const size_t bytes = is_long ? kEagerBytes + 1000 : 50'000;
    const Bytes data = pattern(6, bytes);
    Bytes buffer(bytes, 0);
    Request receive = peer.links->irecv(buffer.data(), bytes, 1, 0, kAll);
    if (is_long) {
      peer.write(FrameKind::kRequest, 0, bytes, 7);
      EXPECT_EQ(peer.read_header().kind, FrameKind::kClear);
      peer.write(FrameKind::kData, 0, bytes, 7);
    } else {
      peer.write(FrameKind::kEager, 0, bytes, 7);
    }
    peer.write(data.data(), bytes / 2);
    const auto limit = steady_clock::now() + kPatience;
    while (buffer[100] != data[100]) {
      ASSERT_LT(steady_clock::now(), limit);
      EXPECT_FALSE(peer.links->test_ended(receive));
    }
    peer.links->cancel(receive);
    EXPECT_TRUE(peer.links->test_ended(receive));
    std::fill(buffer.begin(), buffer.end(), 0xEE);
    peer.write(data.data() + bytes / 2, bytes - bytes / 2);
    peer.write(FrameKind::kEager, 0, 8, 8);
    peer.write(data.data(), 8);
    Bytes got(8);
    receive = peer.links->irecv(got.data(), 8, 1, 0, kAll);
    await(*peer.links, receive);
    EXPECT_TRUE(std::equal(got.begin(), got.end(), data.begin()));
    EXPECT_EQ(buffer, Bytes(bytes, 0xEE));
  }
}

TEST(Links, AReceiveCancelledBeforeItsLongMessageDiscardsIt) {
  const BarePeer peer;
  const Bytes data = pattern(7, kEagerBytes + 1);
  Bytes buffer(data.size(), 0xEE);
  Request receive = peer.links->irecv(buffer.data(), buffer.size(), 1, 0, kAll);
  peer.write(FrameKind::kRequest, 0, data.size(), 3);
  EXPECT_EQ(peer.read_header().kind, FrameKind::kClear);
  peer.links->cancel(receive);
  EXPECT_TRUE(peer.links->test_ended(receive));
  peer.write(FrameKind::kData, 0, data.size(), 3);
  peer.write(data.data(), data.size());
  peer.write(FrameKind::kEager, 0, 0, 4);
  receive = peer.links->irecv(nullptr, 0, 1, 0, kAll);
  await(*peer.links, receive);
  EXPECT_EQ(buffer, Bytes(data.size(), 0xEE));
}

TEST(Links, AReceivePostedWithinAMessageGetsIt) {
  const BarePeer peer;
  const Bytes data = pattern(8, 1000);
  peer.write(FrameKind::kEager, 0, 1000, 0);
  peer.write(data.data(), 400);
  peer.settle();
  Bytes got(1000);
  Request receive = peer.links->irecv(got.data(), 1000, 1, 0, kAll);
  EXPECT_FALSE(peer.links->test_ended(receive));
  peer.write(data.data() + 400, 600);
  await(*peer.links, receive);
  EXPECT_EQ(got, data);
}

TEST(Links, AWithdrawnMessageFailsItsReceive) {
  const auto links = make_links(2);
  const Bytes data = pattern(9, kEagerBytes + 1);
  Request send = links[0]->isend(data.data(), data.size(), 1, 0, kAll);
  links[0]->withdraw(send);
  EXPECT_TRUE(links[0]->test_ended(send));
  Bytes got(data.size());
  Request receive = links[1]->irecv(got.data(), got.size(), 0, 0, kAll);
  const auto limit = steady_clock::now() + kPatience;
  std::string text;
  try {
    while (!links[1]->test(receive, "")) {
      progress(*links[0]);
      ASSERT_LT(steady_clock::now(), limit);
    }
  } catch (const Error& error) {
    text = error.what();
  }
  EXPECT_NE(text.find("rank 0 of group t has withdrawn"), std::string::npos) << text;
}

TEST(Links, AMessageWithdrawnWhileItIsSentArrivesWhole) {
  const BarePeer peer;
  const size_t bytes = 16 << 20;  // more than one call can send
  const Bytes data = pattern(10, bytes);
  Bytes sent = data;
  Request send = peer.links->isend(sent.data(), bytes, 1, 0, kAll);
  const FrameHeader request = peer.read_header();
  EXPECT_EQ(request.kind, FrameKind::kRequest);
  peer.write(FrameKind::kClear, 0, 0, request.id);
  peer.settle();
  ASSERT_FALSE(peer.links->test_ended(send));
  peer.links->withdraw(send);
  EXPECT_TRUE(peer.links->test_ended(send));
  std::fill(sent.begin(), sent.end(), 0xEE);
  EXPECT_EQ(peer.read_header().kind, FrameKind::kData);
  Bytes got(bytes);
  peer.read(got.data(), bytes);
  EXPECT_TRUE(got == data);
}

TEST(Links, UnsentDataWakesWhenThereIsRoom) {
  const BarePeer peer;
  const Bytes data = pattern(11, kEagerBytes);
  std::vector<Request> sends;
  // Fills the kernel's memory.
  do {
    sends.push_back(peer.links->isend(data.data(), data.size(), 1, 0, kAll));
  } while (peer.links->test_ended(sends.back()));
  pollfd waiting{peer.links->poll(), POLLIN, 0};
  while (poll(&waiting, 1, 50) == 1) peer.progress_links();
  std::thread reader([&] {
    Bytes sink(1 << 20);
    size_t left = sends.size() * (sizeof(FrameHeader) + data.size());
    while (left > 0) {
      const ssize_t got = recv(peer.socket.get(), sink.data(), sink.size(), 0);
      if (got > 0) left -= static_cast<size_t>(got);
    }
  });
  for (Request& send : sends) await(*peer.links, send);  // sleeps
  reader.join();
}

TEST(Links, AMessageWakesUntilItIsRead) {
  const auto links = make_links(2);
  pollfd waiting{links[1]->poll(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 0), 0);
  const char byte = 'x';
  Request send = links[0]->isend(&byte, 1, 1, 0, kAll);
  await(*links[0], send);
  EXPECT_EQ(poll(&waiting, 1, -1), 1);
  progress(*links[1]);
  EXPECT_EQ(poll(&waiting, 1, 0), 0);
}

void expect_ended(const std::string& text, int rank) {
  const std::string wanted =
      "the TCP connection to rank " + std::to_string(rank) + " of group t has ended";
  EXPECT_NE(text.find(wanted), std::string::npos) << text;
}

TEST(Links, ADeadPeerFailsItsRequestsAndNoOthers) {
  run_forked_ranks(3,
                   [&](const ForkedRank& process) {
                     const auto links = connect(meet(process.directory, process.rank, 3), 5);
                     add_communicators(*links, 3);
                     Bytes big(1 << 20);
                     const Bytes small = pattern(12, 100);
                     if (process.rank == 1) {
                       // The kernel may wait with the last bytes, so the peers confirm that they
                       // have come.
                       for (const int peer : {0, 2}) {
                         Request send = links->isend(small.data(), 100, peer, 0, kAll);
                         await(*links, send);
                         char byte = 0;
                         Request confirmed = links->irecv(&byte, 1, peer, 8, kAll);
                         await(*links, confirmed);
                       }
                       raise(SIGKILL);
                     }
                     const int living = 2 - process.rank;
                     std::vector<Request> lost;
                     Bytes buffer(100);
                     lost.push_back(links->irecv(buffer.data(), 100, 1, 1, kAll));
                     lost.push_back(links->irecv(buffer.data(), 100, 1, 1, kReversed));
                     lost.push_back(links->isend(big.data(), big.size(), 1, 2, kAll));
                     Bytes from_living(100);
                     Request kept = links->irecv(from_living.data(), 100, living, 3, kAll);
                     const auto limit = steady_clock::now() + kPatience;
                     while (true) {  // the message that rank 1 has sent has arrived
                       pollfd waiting{links->poll(), POLLIN, 0};
                       poll(&waiting, 1, 10);
                       Request probe = links->irecv(buffer.data(), 0, 1, 0, kAll);
                       if (links->test_ended(probe)) break;  // too short: the message is consumed
                       links->cancel(probe);
                       links->test_ended(probe);
                       ASSERT_LT(steady_clock::now(), limit);
                     }
                     const char byte = 'x';
                     Request confirm = links->isend(&byte, 1, 1, 8, kAll);
                     end_of(*links, confirm);
                     for (Request& each : lost) expect_ended(end_of(*links, each), 1);
                     Request late = links->isend(small.data(), 100, 1, 0, kAll);
                     expect_ended(end_of(*links, late), 1);
                     late = links->irecv(buffer.data(), 100, 1, 0, kAll);
                     expect_ended(end_of(*links, late), 1);
                     progress(*links);
                     Request send = links->isend(small.data(), 100, living, 3, kAll);
                     await(*links, send);
                     await(*links, kept);
                     EXPECT_EQ(from_living, small);
                     // Both live ranks stay until both are done.
                     Request done = links->isend(&byte, 1, living, 9, kAll);
                     char other = 0;
                     Request its = links->irecv(&other, 1, living, 9, kAll);
                     await(*links, done);
                     await(*links, its);
                   },
                   {1});
}

TEST(Links, MessagesThatArrivedBeforeTheEndAreReceived) {
  auto links = make_links(2);
  const Bytes data = pattern(13, 1000);
  for (int i = 0; i < 3; ++i) {
    Request send = links[0]->isend(data.data(), 1000, 1, 0, kAll);
    await(*links[0], send);
  }
  const Bytes big(kEagerBytes + 1);
  Request never = links[0]->isend(big.data(), big.size(), 1, 4, kAll);
  EXPECT_FALSE(links[0]->test_ended(never));
  links[0].reset();
  Bytes got(1000);
  Request lost = links[1]->irecv(got.data(), 1, 0, 1, kAll);
  expect_ended(end_of(*links[1], lost), 0);
  pollfd waiting{links[1]->poll(), POLLIN, 0};
  EXPECT_EQ(poll(&waiting, 1, 0), 0);  // an ended link wakes no thread
  for (int i = 0; i < 3; ++i) {
    Request receive;
    if (i == 1) {
      int peer = -1;
      receive = links[1]->irecv_any(got.data(), 1000, 0, kAll, peer);
      EXPECT_EQ(peer, 0);
    } else {
      receive = links[1]->irecv(got.data(), 1000, 0, 0, kAll);
    }
    await(*links[1], receive);
    EXPECT_EQ(got, data);
  }
  Bytes room(big.size());
  int peer = -1;
  EXPECT_FALSE(links[1]->irecv_any(room.data(), room.size(), 4, kAll, peer));
  lost = links[1]->irecv(room.data(), room.size(), 0, 4, kAll);
  expect_ended(end_of(*links[1], lost), 0);
}

TEST(Links, MalformedFramesEndTheLink) {
  const FrameHeader good{kFrameMagic, FrameKind::kEager, 1, 0, 0, 0, 8, 0};
  std::vector<FrameHeader> bad(8, good);
  bad[0].magic = 0x31686267;
  bad[1].kind = FrameKind(0);
  bad[2].kind = FrameKind(200);
  bad[3].communicator = 3;
  bad[4].tag = -1;
  bad[5].bytes = kEagerBytes + 1;
  bad[6].kind = FrameKind::kRequest;
  bad[6].bytes = kLongestMessageBytes + 1;
  bad[7].kind = FrameKind::kData;
  for (const FrameKind kind : {FrameKind::kClear, FrameKind::kDiscard, FrameKind::kWithdrawn}) {
    bad.push_back(good);
    bad.back().kind = kind;
  }
  for (const FrameHeader& header : bad) {
    const BarePeer peer;
    Bytes got(100);
    Request receive = peer.links->irecv(got.data(), 100, 1, 5, kAll);
    peer.write(&header, sizeof header);
    const std::string text = end_of(*peer.links, receive);
    expect_ended(text, 1);
    EXPECT_NE(text.find("data that is not hbm's"), std::string::npos) << text;
  }
}

TEST(Links, MalformedFramesOfRandomBytesEndTheLink) {
  Random random = test_random();
  for (int turn = 0; turn < 200; ++turn) {
    BarePeer peer;
    Bytes got(1000);
    const Bytes big(kEagerBytes + 1);
    Request send = peer.links->isend(big.data(), big.size(), 1, 0, kAll);
    std::vector<Request> receives;
    for (int tag = 0; tag < 3; ++tag) {
      receives.push_back(peer.links->irecv(got.data(), got.size(), 1, tag, kAll));
    }
    for (int frame = 0; frame < 10; ++frame) {
      FrameHeader header{kFrameMagic,
                         static_cast<FrameKind>(1 + random() % 6),
                         1,
                         0,
                         static_cast<int>(random() % 3),
                         0,
                         random() % 2000,
                         random() % 3};
      auto* const bytes = reinterpret_cast<unsigned char*>(&header);
      for (uint64_t change = random() % 3; change > 0; --change) {
        bytes[random() % sizeof header] = static_cast<unsigned char>(random());
      }
      peer.write(&header, sizeof header);
      const Bytes data = pattern(random(), random() % 2 == 0 ? header.bytes % 2000 : 3);
      peer.write(data.data(), data.size());
    }
    peer.socket = Descriptor();
    for (Request& receive : receives) end_of(*peer.links, receive);
    end_of(*peer.links, send);
  }
}

size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

TEST(Links, LeaveNoDescriptors) {
  const size_t before = open_descriptors();
  {
    const auto links = make_links(4);
    EXPECT_GT(open_descriptors(), before);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Links, AForkedChildKeepsNoConnectionOpen) {
  auto links = make_links(2);
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte = 0;
    close(pipes[1]);
    links.clear();  // closes nothing of the parent's
    _exit(read(pipes[0], &byte, 1) == 0 ? 0 : 1);
  }
  char byte = 0;
  Request receive = links[1]->irecv(&byte, 1, 0, 0, kAll);
  links[0].reset();
  expect_ended(end_of(*links[1], receive), 0);
  close(pipes[0]);
  close(pipes[1]);
  int ended = 0;
  waitpid(child, &ended, 0);
  EXPECT_EQ(ended, 0);
}

// -- Connecting

void connect_all(const std::filesystem::path& directory, int size,
                 const std::function<void(int, const bootstrap::Rendezvous&)>& before = {}) {
  std::vector<std::shared_ptr<Links>> links(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const bootstrap::Rendezvous met = meet(directory, rank, size);
      if (before) before(rank, met);
      links[static_cast<size_t>(rank)] = connect(met, 77);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& each : links) each->communicator(bootstrap::everyone(size));
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      if (from == to) continue;
      int got = -1;
      Request send = links[static_cast<size_t>(from)]->isend(&from, sizeof from, to, 0, kAll);
      Request receive = links[static_cast<size_t>(to)]->irecv(&got, sizeof got, from, 0, kAll);
      await(*links[static_cast<size_t>(from)], send);
      await(*links[static_cast<size_t>(to)], receive);
      EXPECT_EQ(got, from);
    }
  }
}

TEST(Connect, EachRankReachesEachOther) {
  const size_t before = open_descriptors();
  for (const int size : {2, 3, 6}) {
    const Scratch scratch;
    std::filesystem::create_directory(scratch.store());
    connect_all(scratch.store(), size);
  }
  EXPECT_EQ(open_descriptors(), before);
}

// The strangers come before the group's own ranks, of which rank 0 waits for them.
TEST(Connect, StrangersAreTurnedAway) {
  constexpr int kRanks = 3;
  const Scratch scratch;
  std::filesystem::create_directory(scratch.store());
  const uint64_t seed = test_seed();
  std::vector<Descriptor> strangers;
  connect_all(scratch.store(), kRanks, [&](int rank, const bootstrap::Rendezvous& met) {
    if (rank != 0) return;
    Random random(seed);
    const bootstrap::Participant& own = met.participant;
    for (int peer = 1; peer < kRanks; ++peer) {
      const auto record = bootstrap::await_published(own, "links", peer, own.deadline);
      ASSERT_TRUE(record);
      uint16_t port = 0;
      std::istringstream(*record) >> port;
      for (int turn = 0; turn < 20; ++turn) {
        Descriptor stranger = start_to_connect("127.0.0.1", port);
        pollfd waiting{stranger.get(), POLLOUT, 0};
        poll(&waiting, 1, -1);
        Bytes bytes = pattern(random(), random() % 100);
        if (turn % 3 == 0 && bytes.size() >= 8) {  // another group's caller
          const uint64_t hello = 0x316f6c6c65486268;
          std::memcpy(bytes.data(), &hello, sizeof hello);
        }
        if (turn % 4 != 0) send(stranger.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (turn % 2 == 0) strangers.push_back(std::move(stranger));
      }
    }
  });
}

TEST(Connect, ARankThatCannotBeReachedIsNamed) {
  const Scratch scratch;
  std::filesystem::create_directory(scratch.store());
  std::thread silent([&] {
    const bootstrap::Rendezvous met = meet(scratch.store(), 1, 2);
    // Publishes a port at which no process listens.
    uint16_t port = 0;
    listen_on_all_addresses(port);
    gather(met.participant, "links", {0, 1},
           [&] { return std::to_string(port) + " token 127.0.0.1"; });
  });
  bootstrap::Rendezvous met = meet(scratch.store(), 0, 2);
  met.participant.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
  expect_error(ErrorKind::kTimeout,
               {"rank 0 of group t", "1 (pid ", "127.0.0.1", "docs/running.md"},
               [&] { connect(met, 1); });
  silent.join();
}

}  // namespace
}  // namespace hbm::communicator::tcp
