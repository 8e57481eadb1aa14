// The conformance tests of segments, transfers and clients (smb_conformance_fixture.h). The tests
// of sums are in smb_conformance_sums_test.cpp.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "seeds.h"
#include "smb_conformance_fixture.h"

namespace hbm::box::client {
namespace {

TEST_P(SmbConformance, NamedTransportIsUsed) {
  EXPECT_EQ(transport_name(connect()->transport()), GetParam());
}

TEST_P(SmbConformance, NewSegmentsAreZero) {
  const auto client = connect();
  const Segment segment = client->alloc({.size = kChunk + 1});
  EXPECT_TRUE(segment.created());
  EXPECT_TRUE(segment.key());
  std::vector<std::byte> back(segment.size(), std::byte{1});
  client->read(segment, 0, back.data(), back.size());
  EXPECT_EQ(std::ranges::count(back, std::byte{0}), static_cast<ptrdiff_t>(back.size()));
}

TEST_P(SmbConformance, ReadsReturnWrittenBytes) {
  const auto writer = connect();
  const auto reader = connect();
  for (const uint64_t size : {uint64_t{1}, uint64_t{7}, uint64_t{4096}, uint64_t{65537}, kChunk + 1,
                              (uint64_t{4} << 20) + 13}) {
    const Segment mine = writer->alloc({.size = size});
    const Segment theirs =
        reader->alloc({.size = size, .key = mine.key(), .mode = protocol::AllocMode::kAttach});
    EXPECT_FALSE(theirs.created());
    const auto bytes = random_bytes(size, test_seed());
    writer->write(mine, 0, bytes.data(), size);
    std::vector<std::byte> back(size);
    reader->read(theirs, 0, back.data(), size);
    ASSERT_EQ(back, bytes) << size;
  }
}

TEST_P(SmbConformance, RegisteredMemoryHoldsTheSameBytes) {
  const auto client = connect();
  constexpr uint64_t kSize = 3 * kChunk + 1;
  const Segment segment = client->alloc({.size = kSize});
  for (int round = 0; round < 3; ++round) {
    auto bytes = random_bytes(kSize, test_seed());
    std::vector<std::byte> back(kSize);
    std::shared_ptr<void> registered = client->register_memory(bytes.data(), bytes.size());
    const auto also = client->register_memory(back.data(), back.size());
    client->write(segment, 0, bytes.data(), kSize);
    registered.reset();
    client->read(segment, 0, back.data(), kSize);
    ASSERT_EQ(back, bytes);
    client->write(segment, 1, bytes.data(), 100);  // correct, too, without registered memory
    client->read(segment, 1, back.data(), 100);
    ASSERT_TRUE(std::equal(back.begin(), back.begin() + 100, bytes.begin()));
  }
}

TEST_P(SmbConformance, RangesTouchNothingElse) {
  const auto client = connect();
  constexpr uint64_t kSize = 3 * kChunk + 5;
  const Segment segment = client->alloc({.size = kSize});
  std::mt19937_64 random = test_random();
  std::vector<std::byte> model(kSize);
  for (int i = 0; i < 60; ++i) {
    const uint64_t offset = random() % (kSize + 1);
    const uint64_t bytes = random() % (kSize - offset + 1);
    const auto data = random_bytes(bytes, random());
    client->write(segment, offset, data.data(), bytes);
    std::ranges::copy(data, model.begin() + static_cast<ptrdiff_t>(offset));
    const uint64_t from = random() % (kSize + 1);
    std::vector<std::byte> back(random() % (kSize - from + 1));
    client->read(segment, from, back.data(), back.size());
    ASSERT_TRUE(std::equal(back.begin(), back.end(), model.begin() + static_cast<ptrdiff_t>(from)));
  }
}

TEST_P(SmbConformance, ARangePastTheEndIsRefusedFirst) {
  const auto client = connect();
  const Segment segment = client->alloc({.size = 100});
  std::vector<std::byte> data(200, std::byte{7});
  EXPECT_EQ(kind_of([&] { client->write(segment, 1, data.data(), 100); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { client->read(segment, ~uint64_t{0}, data.data(), 2); }),
            ErrorKind::kInvalid);
  std::vector<std::byte> back(100);
  client->read(segment, 0, back.data(), 100);
  EXPECT_EQ(back, std::vector<std::byte>(100));
  client->read(segment, 100, back.data(), 0);  // 0 bytes at the segment's end are allowed
}

TEST_P(SmbConformance, ModesOfAlloc) {
  const auto client = connect();
  const protocol::Id key{.high = 1, .low = 2};
  const auto alloc = [&](protocol::AllocMode mode, uint64_t size) {
    return client->alloc({.size = size, .key = key, .mode = mode});
  };
  EXPECT_EQ(cause_of([&] { alloc(protocol::AllocMode::kAttach, 64); }),
            BoxError::Cause::kNoSuchKey);
  EXPECT_TRUE(alloc(protocol::AllocMode::kCreate, 64).created());
  EXPECT_EQ(cause_of([&] { alloc(protocol::AllocMode::kCreate, 64); }), BoxError::Cause::kKeyInUse);
  EXPECT_FALSE(alloc(protocol::AllocMode::kAuto, 64).created());
  EXPECT_THROW(alloc(protocol::AllocMode::kAuto, 65), Error);
  EXPECT_EQ(alloc(protocol::AllocMode::kAttach, 0).size(), 64u);  // size 0 fits any segment
}

TEST_P(SmbConformance, KeyExistsFromCreationToDeletion) {
  const auto maker = connect();
  const auto asker = connect(true);
  const protocol::Id key{.high = 5, .low = 6};
  EXPECT_FALSE(asker->exists(key));
  const Segment segment = maker->alloc({.size = 64, .key = key});
  EXPECT_TRUE(asker->exists(key));
  EXPECT_EQ(maker->stats().segments.at(0).attachments, 1u);  // exists() attaches to nothing
  maker->remove(segment);
  EXPECT_FALSE(asker->exists(key));
  EXPECT_EQ(kind_of([&] { asker->exists({}); }), ErrorKind::kInvalid);
}

TEST_P(SmbConformance, DeletedKeysAreGoneAndAttachmentsStay) {
  const auto master = connect();
  const auto slave = connect();
  const Segment mine = master->alloc({.size = 64});
  const Segment theirs =
      slave->alloc({.size = 64, .key = mine.key(), .mode = protocol::AllocMode::kAttach});
  master->remove(mine);
  master->free(mine);
  EXPECT_EQ(cause_of([&] {
              slave->alloc({.size = 64, .key = mine.key(), .mode = protocol::AllocMode::kAttach});
            }),
            BoxError::Cause::kNoSuchKey);
  EXPECT_EQ(slave->fetch_add(theirs, 0, 3), 0);
  EXPECT_EQ(slave->fetch_add(theirs, 0, 0), 3);
  slave->free(theirs);
  EXPECT_THROW(slave->fetch_add(theirs, 0, 1), Error);
}

TEST_P(SmbConformance, FreedMemoryIsReusable) {
  const auto client = connect();
  const uint64_t most = uint64_t{200} << 20;  // of the box's 256 MiB
  for (int i = 0; i < 4; ++i) {
    const Segment segment = client->alloc({.size = most});
    EXPECT_EQ(kind_of([&] { client->alloc({.size = most}); }), ErrorKind::kExhausted);
    client->remove(segment);
    client->free(segment);
  }
}

TEST_P(SmbConformance, ReadOnlyClientsAndAttachmentsCannotWrite) {
  const auto owner = connect();
  const Segment segment = owner->alloc({.size = 4096});
  const auto reader = connect(/*read_only=*/true);
  AllocOptions attach{.size = 4096, .key = segment.key(), .mode = protocol::AllocMode::kAttach};
  const Segment seen = reader->alloc(attach);
  attach.read_only = true;
  const Segment other_attachment = owner->alloc(attach);
  std::vector<std::byte> data(4096, std::byte{1});
  const std::pair<Client*, const Segment*> guarded[] = {{reader.get(), &seen},
                                                        {owner.get(), &other_attachment}};
  for (const auto& [client, target] : guarded) {
    EXPECT_EQ(cause_of([&] { client->write(*target, 0, data.data(), 4096); }),
              BoxError::Cause::kDenied);
    EXPECT_EQ(cause_of([&] { client->fetch_add(*target, 0, 1); }), BoxError::Cause::kDenied);
    EXPECT_EQ(cause_of([&] {
                client->accumulate(*target, *target, {.dtype = Dtype::kInt64, .bytes = 8});
              }),
              BoxError::Cause::kDenied);
  }
  EXPECT_EQ(cause_of([&] { reader->alloc({.size = 64}); }), BoxError::Cause::kDenied);
  owner->write(segment, 0, data.data(), data.size());
  std::vector<std::byte> back(4096);
  reader->read(seen, 0, back.data(), back.size());
  EXPECT_EQ(back, data);
}

// docs/memory-box.md, "One client": operations on shared bytes keep the order of issue.
TEST_P(SmbConformance, AsynchronousOperationsOnOneRangeKeepOrder) {
  const auto client = connect();
  constexpr uint64_t kBytes = kChunk + 64;
  const Segment source = client->alloc({.size = kBytes});
  const Segment total = client->alloc({.size = kBytes});
  constexpr int kRounds = 30;
  std::vector<std::vector<int64_t>> values;
  std::vector<std::vector<int64_t>> sums(kRounds, std::vector<int64_t>(kBytes / 8));
  for (int i = 0; i < kRounds; ++i) values.emplace_back(kBytes / 8, i + 1);
  std::vector<Future> futures;
  for (int i = 0; i < kRounds; ++i) {
    Batch batch = client->batch();
    futures.push_back(batch.write(source, 0, bytes_of(values[i]), kBytes));
    futures.push_back(batch.accumulate(total, source, {.dtype = Dtype::kInt64, .bytes = kBytes}));
    futures.push_back(batch.read(total, 0, bytes_of(sums[i]), kBytes));
    batch.issue();
  }
  for (const Future& future : futures) future.get();
  for (int i = 0; i < kRounds; ++i) {
    const int64_t sum = (i + 1) * (i + 2) / 2;
    EXPECT_EQ(std::ranges::count(sums[i], sum), static_cast<ptrdiff_t>(kBytes / 8)) << i;
  }
}

// docs/memory-box.md: a read concurrent with a write sees each aligned element of 8 bytes old or
// new. This holds for all offsets of the read and the write, and for any alignment of local memory.
TEST_P(SmbConformance, ElementsAreNeverTorn) {
  const auto writer = connect();
  constexpr uint64_t kBytes = 4 * kChunk;
  // Over verbs, transfers begin at offset 0 only. An adapter cuts a transfer into packets of a
  // multiple of 8 bytes, so it would cut elements of a transfer from another offset.
  const uint64_t begins = GetParam() == "verbs" ? 1 : 8;
  const Segment segment = writer->alloc({.size = kBytes});
  std::atomic<bool> stop{false};
  std::thread writing([&] {
    std::vector<uint64_t> patterns[2] = {std::vector<uint64_t>(kBytes / 8 + 1, 0),
                                         std::vector<uint64_t>(kBytes / 8 + 1, ~uint64_t{0})};
    for (int i = 0; !stop.load(std::memory_order_relaxed); ++i) {
      const uint64_t begin = static_cast<uint64_t>(i / 2) % begins;
      const uint64_t shift = static_cast<uint64_t>(i / 16) % begins;
      writer->write(segment, begin, bytes_of(patterns[i % 2]) + shift, kBytes - begin);
    }
  });
  const auto reader = connect();
  const Segment seen =
      reader->alloc({.size = kBytes, .key = segment.key(), .mode = protocol::AllocMode::kAttach});
  std::vector<std::byte> memory(kBytes + 8);
  std::vector<uint64_t> found(kBytes / 8);
  ptrdiff_t whole = 0;
  constexpr int kReads = 200;
  for (int i = 0; i < kReads; ++i) {
    const uint64_t begin = static_cast<uint64_t>(i) % begins;
    std::byte* const local = memory.data() + static_cast<uint64_t>(i / 8) % begins;
    reader->read(seen, begin, local + begin, kBytes - begin);
    std::memcpy(found.data(), local, kBytes);
    found[0] = 0;  // may be torn: transfers cover only a part of it
    whole += std::ranges::count_if(found, [](uint64_t v) { return v == 0 || v == ~uint64_t{0}; });
  }
  stop = true;
  writing.join();
  EXPECT_EQ(whole, static_cast<ptrdiff_t>(kReads * found.size()));
}

TEST_P(SmbConformance, WaitingForUnissuedOperationsIsAnError) {
  const auto client = connect();
  const Segment segment = client->alloc({.size = 8});
  const auto discarded = [&] {
    Batch batch = client->batch();
    Future future = batch.fetch_add(segment, 0, 1);
    EXPECT_FALSE(future.done());
    EXPECT_EQ(kind_of([&] { future.get(); }), ErrorKind::kInvalid);
    return future;
  }();
  EXPECT_TRUE(discarded.done());
  EXPECT_EQ(kind_of([&] { discarded.get(); }), ErrorKind::kInvalid);

  Batch batch = client->batch();
  const Future refused = batch.fetch_add(segment, 0, 1);
  client->free(segment);
  EXPECT_EQ(kind_of([&] { batch.issue(); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([&] { refused.get(); }), ErrorKind::kInvalid);
}

TEST_P(SmbConformance, LongestTimeoutsDoNotExpire) {
  using std::chrono::milliseconds;
  ClientOptions options;
  options.url = server_.url();
  options.token = "conformance";
  options.transport = parse_transport(GetParam());
  options.connect_timeout = options.reconnect_timeout = options.timeout = milliseconds::max();
  Client client(options);
  const Segment segment = client.alloc({.size = 8});
  EXPECT_EQ(client.fetch_add(segment, 0, 1), 0);
  EXPECT_EQ(kind_of([&] { client.close(milliseconds(-1)); }), ErrorKind::kInvalid);
  client.close(milliseconds::max());
}

TEST_P(SmbConformance, ManyShortOperationsTogether) {
  const auto client = connect();
  constexpr int kCells = 500;
  const Segment segment = client->alloc({.size = kCells * 8});
  std::vector<int64_t> values(kCells), back(kCells);
  std::iota(values.begin(), values.end(), -7);
  std::vector<Future> futures;
  Batch batch = client->batch();
  for (int i = 0; i < kCells; ++i) {
    futures.push_back(batch.write(segment, 8 * i, bytes_of(values) + 8 * i, 8));
    futures.push_back(batch.fetch_add(segment, 8 * i, 1));
    futures.push_back(batch.read(segment, 8 * i, bytes_of(back) + 8 * i, 8));
  }
  batch.issue_and_wait_next();
  for (const Future& future : futures) future.get();
  for (int i = 0; i < kCells; ++i) EXPECT_EQ(back[i], values[i] + 1);
}

TEST_P(SmbConformance, ThreadsShareAClient) {
  const auto client = connect();
  constexpr int kThreads = 4;
  const Segment segment = client->alloc({.size = kThreads * 8});
  std::vector<std::thread> threads;
  for (int each = 0; each < kThreads; ++each) {
    threads.emplace_back([&, each] {
      const uint64_t cell = 8 * static_cast<uint64_t>(each);
      for (int64_t i = 0; i < 200; ++i) {
        ASSERT_EQ(client->fetch_add(segment, cell, 1), 2 * i);
        int64_t value = 0;
        client->read(segment, cell, reinterpret_cast<std::byte*>(&value), 8);
        ASSERT_EQ(value, 2 * i + 1);
        value = 2 * i + 2;
        client->write(segment, cell, reinterpret_cast<std::byte*>(&value), 8);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_P(SmbConformance, ClientIsUnusableInAForkedChild) {
  auto client = connect();
  const Segment segment = client->alloc({.size = 40 * kChunk});
  const auto bytes = random_bytes(segment.size(), test_seed());
  client->write(segment, 0, bytes.data(), bytes.size());  // starts the threads of the client
  const pid_t child = fork();
  if (child == 0) {
    const bool refused =
        kind_of([&] { client->ping(); }) == ErrorKind::kUnavailable &&
        kind_of([&] { client->fetch_add(segment, 0, 1); }) == ErrorKind::kUnavailable;
    client.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::vector<std::byte> back(segment.size());
  client->read(segment, 0, back.data(), back.size());
  EXPECT_EQ(back, bytes);
}

TEST_P(SmbConformance, WrongTokensAreDenied) {
  ClientOptions options;
  options.url = server_.url();
  options.transport = parse_transport(GetParam());
  for (const char* token : {"", "wrong", "conformance "}) {
    options.token = token;
    EXPECT_EQ(cause_of([&] { Client client(options); }), BoxError::Cause::kDenied) << token;
  }
}

TEST_P(SmbConformance, AClosedBoxIsNoticed) {
  ClientOptions options;
  options.url = server_.url();
  options.token = "conformance";
  options.transport = parse_transport(GetParam());
  options.reconnect_timeout = std::chrono::milliseconds(300);
  Client client(options);
  const Segment segment = client.alloc({.size = 64});
  server_.close();
  std::byte cell[8];
  EXPECT_EQ(cause_of([&] { client.fetch_add(segment, 0, 1); }), BoxError::Cause::kUnreachable);
  EXPECT_EQ(cause_of([&] { client.read(segment, 0, cell, 8); }), BoxError::Cause::kUnreachable);
}

INSTANTIATE_TEST_SUITE_P(Transports, SmbConformance, testing::ValuesIn(transports()),
                         [](const auto& info) { return info.param; });

// One box serves a client of each transport. Each client sees the changes of the others.
TEST(SmbMixedTransports, ClientsShareOneBox) {
  ServerOptions server_options;
  server_options.listen = {setting("HBM_BOX_HOST", "127.0.0.1") + ":0"};
  server_options.memory = uint64_t{64} << 20;
  std::vector<std::string> names = {"shm", "tcp"};
  if (std::ranges::count(transports(), "verbs") > 0) {
    names.push_back("verbs");
    server_options.verbs = VerbsChoice::kOn;
  }
  Server server(server_options);
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<Segment> segments;
  const protocol::Id key{.high = 0, .low = 77};
  for (const std::string& name : names) {
    ClientOptions options;
    options.url = server.url();
    options.transport = parse_transport(name);
    clients.push_back(std::make_unique<Client>(options));
    segments.push_back(clients.back()->alloc({.size = kChunk, .key = key}));
  }
  std::vector<int64_t> values(kChunk / 8), back(kChunk / 8);
  for (size_t writer = 0; writer < clients.size(); ++writer) {
    std::ranges::fill(values, static_cast<int64_t>(writer) + 10);
    clients[writer]->write(segments[writer], 0, bytes_of(values), kChunk);
    for (size_t reader = 0; reader < clients.size(); ++reader) {
      clients[reader]->read(segments[reader], 0, bytes_of(back), kChunk);
      EXPECT_EQ(back, values) << names[writer] << " to " << names[reader];
      clients[reader]->accumulate(segments[reader], segments[reader],
                                  {.dtype = Dtype::kInt64, .bytes = kChunk});
      for (int64_t& value : values) value *= 2;
    }
  }
}

}  // namespace
}  // namespace hbm::box::client
