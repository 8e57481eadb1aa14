// The segments that a client may access, and for how long: keys, attachments and rights.
#include "box/server/service.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"
#include "smb_service_fixture.h"

namespace hbm::box::server {
namespace {

using protocol::AllocMode;
using protocol::Opcode;
using protocol::Status;

constexpr uint64_t kSize = 1 << 16;
constexpr protocol::Id kKey{1, 2};

TEST(Service, PaperAllocationAndRelease) {
  Box box;
  Caller master(box), slave(box);
  // Steps A1 to A4 of the paper on the Soft Memory Box: the master asks, and the box allocates. The
  // master gets the key and sends it to the slaves.
  const Reply made = master.alloc(kSize, {}, AllocMode::kCreate);
  const auto of_master = as<protocol::Allocated>(made);
  EXPECT_EQ(of_master.created, 1u);
  EXPECT_EQ(of_master.size, kSize);
  ASSERT_TRUE(of_master.key);
  // A5 to A7: a slave asks with this key and the same size, and the box attaches it.
  const Reply found = slave.alloc(kSize, of_master.key, AllocMode::kAttach);
  EXPECT_EQ(as<protocol::Allocated>(found).created, 0u);
  EXPECT_EQ(found.granted, made.granted);
  master.memory<int>(1)[3] = 42;
  EXPECT_EQ(slave.memory<int>(1)[3], 42);
  // D1, D2: a slave releases. D3 to D6: the master deletes and releases, and the memory is free.
  EXPECT_EQ(slave.free(1).status, Status::kOk);
  EXPECT_EQ(slave.access(1, 0, 1).status, Status::kNotAttached);
  EXPECT_EQ(master.remove(1).status, Status::kOk);
  EXPECT_EQ(slave.alloc(kSize, of_master.key, AllocMode::kAttach).status, Status::kNoSuchKey);
  EXPECT_EQ(master.free(1).status, Status::kOk);
  const_cast<Reply&>(made).granted.reset();
  const_cast<Reply&>(found).granted.reset();
  EXPECT_EQ(box.pool->stats().used, 0u);
}

TEST(Service, ModesOfAllocation) {
  Box box;
  Caller first(box), second(box);
  EXPECT_EQ(first.alloc(kSize, kKey, AllocMode::kAttach).status, Status::kNoSuchKey);
  EXPECT_EQ(as<protocol::Allocated>(first.alloc(kSize, kKey, AllocMode::kAuto)).created, 1u);
  EXPECT_EQ(as<protocol::Allocated>(second.alloc(kSize, kKey, AllocMode::kAuto)).created, 0u);
  EXPECT_EQ(second.alloc(kSize, kKey, AllocMode::kCreate).status, Status::kExists);
  EXPECT_EQ(second.alloc(kSize + 1, kKey, AllocMode::kAttach).status, Status::kSizeMismatch);
  EXPECT_EQ(second.alloc(kSize + 1, kKey, AllocMode::kAuto).status, Status::kSizeMismatch);
  const Reply any = second.alloc(0, kKey, AllocMode::kAttach, protocol::Alloc::kAnySize);
  EXPECT_EQ(as<protocol::Allocated>(any).size, kSize);
  EXPECT_EQ(second.alloc(0, {}, AllocMode::kCreate).status, Status::kRange);
  EXPECT_EQ(second.alloc(uint64_t{1} << 50, {}, AllocMode::kCreate).status, Status::kExhausted);
  EXPECT_EQ(second.alloc(8, kKey, static_cast<AllocMode>(9)).status, Status::kMalformed);
  EXPECT_EQ(second.alloc(8, kKey, AllocMode::kAuto, 64).status, Status::kMalformed);
}

TEST(Service, NewSegmentsAreZeroAndHandlesAreUnique) {
  Box box;
  Caller caller(box);
  caller.alloc(kSize);
  caller.memory<int>(1)[0] = 1;
  caller.remove(1);
  caller.free(1);
  ASSERT_EQ(caller.alloc(kSize).status, Status::kOk);
  EXPECT_EQ(caller.memory<int>(2)[0], 0);
  protocol::Alloc again = caller.alloc_request(kSize, {}, AllocMode::kCreate);
  again.handle = 2;
  EXPECT_EQ(caller.call(Opcode::kAlloc, bytes_of(again)).status, Status::kMalformed);
}

TEST(Service, RangesAndTypes) {
  Box box;
  Caller caller(box);
  caller.alloc(100);
  EXPECT_EQ(caller.access(1, 0, 100).status, Status::kOk);
  EXPECT_EQ(caller.access(1, 100, 0).status, Status::kOk);
  EXPECT_EQ(caller.access(1, 1, 100).status, Status::kRange);
  EXPECT_EQ(caller.access(1, UINT64_MAX, 8).status, Status::kRange);
  EXPECT_EQ(caller.access(9, 0, 1).status, Status::kNotAttached);
  EXPECT_EQ(caller.fetch_add(1, 4, 1).status, Status::kRange);
  EXPECT_EQ(caller.fetch_add(1, 96, 1).status, Status::kRange);
  EXPECT_EQ(caller.accumulate(1, 1, 104).status, Status::kRange);
  EXPECT_EQ(caller.accumulate(1, 1, 6).status, Status::kRange);
  EXPECT_EQ(caller.accumulate(1, 2, 8).status, Status::kNotAttached);
  EXPECT_EQ(caller.accumulate(1, 1, 8, 1, Dtype::kComplex64).status, Status::kUnsupported);
  EXPECT_EQ(caller.accumulate(1, 1, 8, 1, static_cast<Dtype>(99)).status, Status::kMalformed);
  protocol::Accumulate shifted = caller.accumulate_request(1, 1, 16);
  shifted.source_offset = 8;
  EXPECT_EQ(caller.accumulate(shifted).status, Status::kUnsupported);
  shifted = caller.accumulate_request(1, 1, 16);
  shifted.source_offset = 16;
  EXPECT_EQ(caller.accumulate(shifted).status, Status::kOk);
}

TEST(Service, RangesOfTwoTypes) {
  Box box;
  Caller caller(box);
  caller.alloc(96);
  caller.alloc(48);
  const auto call = [&](uint32_t target, uint32_t source, Dtype dtype, Dtype source_dtype,
                        uint64_t bytes, uint64_t to, uint64_t from) {
    protocol::Accumulate request = caller.accumulate_request(target, source, bytes, 1, dtype);
    request.source_dtype = static_cast<uint8_t>(source_dtype);
    request.combine = static_cast<uint8_t>(Combine::kAssign);
    request.target_offset = to;
    request.source_offset = from;
    return caller.accumulate(request).status;
  };
  constexpr Dtype kWide = Dtype::kFloat32, kNarrow = Dtype::kBFloat16;
  // `bytes` counts the target's bytes: the source has half or twice as many.
  EXPECT_EQ(call(1, 2, kWide, kNarrow, 96, 0, 0), Status::kOk);
  EXPECT_EQ(call(2, 1, kNarrow, kWide, 48, 0, 0), Status::kOk);
  EXPECT_EQ(call(1, 2, kWide, kNarrow, 96, 0, 2), Status::kRange);
  EXPECT_EQ(call(2, 1, kNarrow, kWide, 44, 4, 12), Status::kRange);
  // The target's offset must be a multiple of the target's element size, and the source's offset a
  // multiple of the source's element size.
  EXPECT_EQ(call(1, 2, kWide, kNarrow, 8, 4, 2), Status::kOk);
  EXPECT_EQ(call(1, 2, kWide, kNarrow, 8, 2, 4), Status::kRange);
  EXPECT_EQ(call(2, 1, kNarrow, kWide, 8, 4, 2), Status::kRange);
  EXPECT_EQ(call(2, 1, kNarrow, kWide, 3, 0, 0), Status::kRange);
  // Within one segment, source and target of two types must not overlap, even if both begin at the
  // same offset.
  EXPECT_EQ(call(1, 1, kWide, kNarrow, 64, 0, 64), Status::kOk);
  EXPECT_EQ(call(1, 1, kWide, kNarrow, 64, 0, 62), Status::kUnsupported);
  EXPECT_EQ(call(1, 1, kNarrow, kWide, 32, 64, 0), Status::kOk);
  EXPECT_EQ(call(1, 1, kNarrow, kWide, 32, 62, 0), Status::kUnsupported);
  EXPECT_EQ(call(1, 1, kWide, kNarrow, 8, 0, 0), Status::kUnsupported);
  EXPECT_EQ(call(1, 1, kWide, kWide, 8, 0, 0), Status::kOk);

  EXPECT_EQ(call(1, 2, Dtype::kFloat16, kNarrow, 8, 0, 0), Status::kUnsupported);
  EXPECT_EQ(call(1, 2, kWide, Dtype::kInt32, 8, 0, 0), Status::kUnsupported);
  EXPECT_EQ(call(1, 2, kWide, static_cast<Dtype>(99), 8, 0, 0), Status::kMalformed);
  protocol::Accumulate neither = caller.accumulate_request(1, 2, 8);
  neither.combine = 2;
  EXPECT_EQ(caller.accumulate(neither).status, Status::kMalformed);
}

TEST(Service, ReadOnlyAttachmentsCannotWrite) {
  Box box;
  Caller owner(box), reader(box, protocol::Join::kReadOnlyClient);
  owner.alloc(kSize, kKey, AllocMode::kCreate);
  EXPECT_EQ(reader.alloc(kSize, {}, AllocMode::kCreate).status, Status::kReadOnly);
  const Reply attached = reader.alloc(kSize, kKey);
  EXPECT_FALSE(attached.may_write);
  const uint32_t handle = reader.handle();
  EXPECT_EQ(reader.access(handle, 0, 8).status, Status::kOk);
  EXPECT_EQ(reader.access(handle, 0, 8, true).status, Status::kReadOnly);
  EXPECT_EQ(reader.accumulate(handle, handle, 8).status, Status::kReadOnly);
  EXPECT_EQ(reader.fetch_add(handle, 0, 1).status, Status::kReadOnly);
  EXPECT_EQ(reader.remove(handle).status, Status::kReadOnly);
  EXPECT_EQ(reader.free(handle).status, Status::kOk);

  owner.alloc(kSize, kKey, AllocMode::kAttach, protocol::Alloc::kReadOnly);
  EXPECT_EQ(owner.access(2, 0, 8, true).status, Status::kReadOnly);
  EXPECT_EQ(owner.accumulate(1, 2, 8).status, Status::kOk);
  EXPECT_EQ(owner.accumulate(2, 1, 8).status, Status::kReadOnly);
}

TEST(Service, DeletedWhileAttached) {
  Box box;
  Caller first(box), second(box);
  first.alloc(kSize, kKey);
  second.alloc(kSize, kKey);
  second.memory<int>(1)[0] = 7;
  EXPECT_EQ(first.remove(1).status, Status::kOk);
  EXPECT_EQ(second.remove(1).status, Status::kNoSuchKey);
  EXPECT_EQ(first.free(1).status, Status::kOk);
  EXPECT_EQ(second.memory<int>(1)[0], 7);
  // The key is free for another segment. The old attachment does not reach that segment.
  const Reply other = first.alloc(kSize, kKey, AllocMode::kCreate);
  EXPECT_EQ(as<protocol::Allocated>(other).created, 1u);
  EXPECT_EQ(first.memory<int>(first.handle())[0], 0);
  EXPECT_EQ(second.free(1).status, Status::kOk);
  EXPECT_EQ(box.service->statistics().totals.segments, 1u);
}

TEST(Service, TemporarySegmentsGoWithTheirLastAttachment) {
  Box box;
  Caller first(box), second(box);
  first.alloc(kSize, kKey, AllocMode::kAuto, protocol::Alloc::kTemporary);
  second.alloc(kSize, kKey);
  first.free(1);
  EXPECT_EQ(box.service->statistics().totals.segments, 1u);
  second.call(Opcode::kLeave);
  EXPECT_EQ(box.service->statistics().totals.segments, 0u);
  EXPECT_EQ(first.alloc(kSize, kKey, AllocMode::kAttach).status, Status::kNoSuchKey);
}

TEST(Service, QueryingAKeyDoesNotAffectTemporarySegments) {
  Box box;
  Caller maker(box), asker(box);
  const auto exists = [&] {
    return as<protocol::KeyFound>(asker.call(Opcode::kExists, bytes_of(protocol::KeyQuery{kKey})))
        .found;
  };
  EXPECT_EQ(exists(), 0u);
  maker.alloc(kSize, kKey, AllocMode::kAuto, protocol::Alloc::kTemporary);
  EXPECT_EQ(exists(), 1u);
  EXPECT_EQ(exists(), 1u);
  maker.free(1);
  EXPECT_EQ(exists(), 0u);
}

TEST(Service, ConcurrentCreationsOfAKeyYieldOneSegment) {
  Box box;
  std::vector<std::unique_ptr<Caller>> callers;
  std::vector<std::future<Reply>> replies;
  for (int i = 0; i < 16; ++i) callers.push_back(std::make_unique<Caller>(box));
  for (auto& caller : callers) {
    const auto request = caller->alloc_request(kSize, kKey, AllocMode::kAuto);
    replies.push_back(caller->start(Opcode::kAlloc, bytes_of(request)));
  }
  uint32_t created = 0;
  for (auto& reply : replies) created += as<protocol::Allocated>(reply.get()).created;
  EXPECT_EQ(created, 1u);
  EXPECT_EQ(box.service->statistics().segments.front().attachments, 16u);
}

TEST(Service, FailedPreparationPreventsASegment) {
  Box box;
  int prepared = 0;
  box.service->on_new_segment([&](storage::BoxSegment& segment) {
    if (segment.size == 13) throw Error(ErrorKind::kExhausted, "no more registrations");
    ++prepared;
  });
  Caller caller(box);
  EXPECT_EQ(caller.alloc(kSize, kKey).status, Status::kOk);
  const Reply failed = caller.alloc(13, {});
  EXPECT_EQ(failed.status, Status::kExhausted);
  EXPECT_EQ(failed.cause, "no more registrations");
  EXPECT_EQ(prepared, 1);
  EXPECT_EQ(box.service->statistics().totals.segments, 1u);
}

TEST(Service, StatisticsCountAndPage) {
  Box box;
  Caller caller(box);
  caller.alloc(kSize, kKey);
  caller.access(1, 0, 100);
  caller.access(1, 0, 50, true);
  caller.fetch_add(1, 0, 1);
  caller.accumulate(1, 1, 32);
  protocol::Accumulate conversion = caller.accumulate_request(1, 1, 32, 1, Dtype::kFloat64);
  conversion.source_dtype = static_cast<uint8_t>(Dtype::kFloat32);
  conversion.combine = static_cast<uint8_t>(Combine::kAssign);
  conversion.source_offset = 64;
  caller.accumulate(conversion);
  const protocol::StatsQuery query{0, 0};
  const Reply reply = caller.call(Opcode::kStats, bytes_of(query));
  protocol::StatsTotals totals;
  ASSERT_EQ(reply.payload.size(),
            sizeof totals + sizeof(protocol::ClientStats) + sizeof(protocol::SegmentStats));
  std::memcpy(&totals, reply.payload.data(), sizeof totals);
  EXPECT_EQ(totals.counts.read_bytes, 100u);
  EXPECT_EQ(totals.counts.written_bytes, 50u);
  EXPECT_EQ(totals.counts.accumulates, 2u);
  EXPECT_EQ(totals.counts.accumulated_bytes, 64u);  // bytes of targets
  EXPECT_EQ(totals.counts.fetch_adds, 1u);
  EXPECT_EQ(totals.clients, 1u);
  EXPECT_EQ(totals.used_bytes, kSize);
  protocol::SegmentStats segment;
  std::memcpy(&segment, reply.payload.data() + sizeof totals + sizeof(protocol::ClientStats),
              sizeof segment);
  EXPECT_EQ(segment.key, kKey);
  EXPECT_EQ(segment.counts.read_bytes, 100u);

  Statistics many;
  many.clients.resize(20'000);
  many.segments.resize(20'000);
  protocol::StatsQuery next{0, 0};
  size_t pages = 0;
  while (next.first_client < many.clients.size() || next.first_segment < many.segments.size()) {
    const std::vector<std::byte> payload = page(many, next, {});
    ASSERT_LE(payload.size(), protocol::kMaxPayload);
    std::memcpy(&totals, payload.data(), sizeof totals);
    ASSERT_GT(totals.clients_here + totals.segments_here, 0u);
    next.first_client += totals.clients_here;
    next.first_segment += totals.segments_here;
    ++pages;
  }
  EXPECT_EQ(next.first_client, many.clients.size());
  EXPECT_EQ(next.first_segment, many.segments.size());
  EXPECT_LE(pages, 5u);
}

struct Seen {
  std::vector<protocol::ClientStats> clients;
  std::vector<protocol::SegmentStats> segments;
};

Seen seen_by(Caller& caller) {
  const Reply reply = caller.call(Opcode::kStats, bytes_of(protocol::StatsQuery{0, 0}));
  protocol::StatsTotals totals;
  std::memcpy(&totals, reply.payload.data(), sizeof totals);
  Seen seen;
  seen.clients.resize(totals.clients_here);
  seen.segments.resize(totals.segments_here);
  const std::byte* const rows = reply.payload.data() + sizeof totals;
  const size_t bytes = seen.clients.size() * sizeof(protocol::ClientStats);
  std::memcpy(seen.clients.data(), rows, bytes);
  std::memcpy(seen.segments.data(), rows + bytes,
              seen.segments.size() * sizeof(protocol::SegmentStats));
  return seen;
}

TEST(Service, StatisticsHideTheIdsOfOtherClients) {
  Box box;
  Caller owner(box), stranger(box);
  owner.alloc(kSize, kKey);
  owner.alloc(kSize, {9, 9});
  stranger.alloc(kSize, {9, 9});
  const auto count = [](const auto& rows, const protocol::Id& id, auto member) {
    return std::count_if(rows.begin(), rows.end(),
                         [&](const auto& row) { return row.*member == id; });
  };
  const auto key = &protocol::SegmentStats::key;
  const auto session = &protocol::ClientStats::session;

  const Seen mine = seen_by(owner);
  EXPECT_EQ(count(mine.segments, kKey, key), 1);
  EXPECT_EQ(count(mine.segments, {9, 9}, key), 1);
  EXPECT_EQ(count(mine.clients, owner.joining.id, session), 1);
  EXPECT_EQ(count(mine.clients, stranger.joining.id, session), 0);

  const Seen theirs = seen_by(stranger);
  ASSERT_EQ(theirs.segments.size(), 2u);
  EXPECT_EQ(count(theirs.segments, kKey, key), 0);
  EXPECT_EQ(count(theirs.segments, {9, 9}, key), 1);
  EXPECT_EQ(count(theirs.clients, owner.joining.id, session), 0);
  const Seen again = seen_by(stranger);  // the same fingerprints
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(again.segments[i].key, theirs.segments[i].key);
    EXPECT_EQ(again.clients[i].session, theirs.clients[i].session);
  }
  stranger.free(1);
  EXPECT_EQ(count(seen_by(stranger).segments, {9, 9}, key), 0);
  EXPECT_EQ(box.service->statistics().segments.front().key, kKey);  // the box itself has the key
}

// The newest connection with a known host counts. A connection without one, as over verbs, changes
// nothing.
TEST(Service, StatisticsHaveTheHostsOfClientsInTheirOrder) {
  Box box;
  Caller first(box, 0, {}, "192.0.2.1");
  Caller second(box, 0, {}, "local");
  const protocol::Id moved = first.joining.id;
  const Caller elsewhere(box, protocol::Join::kFurtherConnection, moved, "192.0.2.7");
  const Caller unknown(box, protocol::Join::kFurtherConnection, moved);
  const server::Statistics found = box.service->statistics();
  ASSERT_EQ(found.clients.size(), 2u);
  ASSERT_EQ(found.hosts.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(found.hosts[i], found.clients[i].session == moved ? "192.0.2.7" : "local");
  }
}

TEST(Service, SegmentsLeaveDescriptorsForOthers) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{256, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  {
    Box box;
    Caller greedy(box);
    Reply reply;
    int made = 0;
    while ((reply = greedy.alloc(1)).status == Status::kOk && made < 256) ++made;
    EXPECT_GT(made, 100);
    EXPECT_EQ(reply.status, Status::kExhausted);
    EXPECT_NE(reply.cause.find("ulimit -n"), std::string::npos) << reply.cause;
    std::vector<Descriptor> others;
    for (int i = 0; i < 60; ++i) others.emplace_back(dup(0));
    EXPECT_TRUE(others.back());
    others.clear();
    greedy.free(1);
    EXPECT_EQ(greedy.remove(2).status, Status::kOk);
  }
  setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace hbm::box::server
