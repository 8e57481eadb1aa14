// The store: recovery after a restart, and detection of damage.
#include "box/server/storage/store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "box/server/accumulator.h"
#include "box/server/storage/directory.h"
#include "box/server/storage/segment.h"
#include "expect_error.h"
#include "reduce_reference.h"
#include "smb_store_fixture.h"

namespace {
std::atomic<bool> disk_fails{false};
}

// Replaces libc's function, so that it fails while disk_fails is true.
extern "C" int msync(void* at, size_t bytes, int flags) {
  if (!disk_fails) return static_cast<int>(syscall(SYS_msync, at, bytes, flags));
  errno = EIO;
  return -1;
}

namespace hbm::box::server::storage {
namespace {

namespace fs = std::filesystem;

constexpr RecordSizes kSizes{.sessions = 4, .operations = 2, .parts = 4, .chunk = 4096};

class StoreTest : public testing::Test {
 protected:
  void SetUp() override { open(); }

  void open(const RecordSizes& sizes = kSizes, bool sync = false) {
    found.clear();
    store.reset();
    store = open_store(directory, sizes, sync);
    for (const auto& one : store->take_found()) found[one->key.low] = one;
  }
  void close() {
    found.clear();
    store.reset();
  }

  size_t files(const std::string& name = "segments") const {
    if (!fs::exists(directory + "/" + name)) return 0;
    return std::distance(fs::directory_iterator(directory + "/" + name), {});
  }
  std::string catalogue() const { return directory + "/journal"; }

  const Scratch scratch;
  const std::string directory = scratch.store();
  std::unique_ptr<Store> store;
  std::map<uint64_t, std::shared_ptr<BoxSegment>> found;
};

void flip_byte(const std::string& path, uint64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(file.get());
  file.seekp(static_cast<std::streamoff>(at));
  file.put(static_cast<char>(byte ^ 1));
}

TEST_F(StoreTest, SegmentsSurviveARestart) {
  const protocol::Id generation = store->generation();
  Creation temporary = creation(2, 100'000);
  temporary.temporary = true;
  *contents<uint64_t>(*store->create(creation(1, 5000))) = 11;
  contents<char>(*store->create(temporary))[99'999] = 'x';
  open();
  EXPECT_EQ(store->generation(), generation);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[1]->size, 5000u);
  EXPECT_FALSE(found[1]->temporary);
  EXPECT_EQ(*contents<uint64_t>(*found[1]), 11u);
  EXPECT_EQ(found[2]->size, 100'000u);
  EXPECT_TRUE(found[2]->temporary);
  EXPECT_EQ(contents<char>(*found[2])[99'999], 'x');
  EXPECT_EQ(found[2]->creator, temporary.creator);
}

TEST_F(StoreTest, RemovedSegmentsStayRemoved) {
  auto first = store->create(creation(1, 5000));
  auto second = store->create(creation(2, 5000));
  store->remove(*first);
  EXPECT_EQ(files(), 2u) << "the file is there as long as somebody uses it";
  first.reset();
  EXPECT_EQ(files(), 1u);
  second.reset();
  open();
  EXPECT_EQ(found.size(), 1u);
  EXPECT_TRUE(found.contains(2));
}

TEST_F(StoreTest, KeyIsReusableDuringTheOldSegmentsUse) {
  const auto old = store->create(creation(1, 5000));
  *contents<int>(*old) = 1;
  store->remove(*old);
  *contents<int>(*store->create(creation(1, 6000))) = 2;
  EXPECT_EQ(*contents<int>(*old), 1);
  open();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[1]->size, 6000u);
  EXPECT_EQ(*contents<int>(*found[1]), 2);
}

TEST_F(StoreTest, SerialsStayApartAfterARestart) {
  store->create(creation(1, 5000));
  store->remove(*store->create(creation(2, 5000)));
  open();
  store->create(creation(3, 5000));
  open();
  EXPECT_EQ(found.size(), 2u);
  EXPECT_NE(found[1]->stored->serial, found[3]->stored->serial);
}

TEST_F(StoreTest, IncompleteSegmentIsRemoved) {
  const auto one = store->create(creation(1, 5000));
  fs::copy_file(one->stored->path,
                directory + "/segments/" + std::string(32, 'a') + "." + std::string(15, '0') + "9");
  open();
  EXPECT_EQ(files(), 1u);
  EXPECT_EQ(files("lost"), 0u);
}

TEST_F(StoreTest, ATornRecordIsDroppedAndItsFilePreserved) {
  store->create(creation(1, 5000));
  store->create(creation(2, 5000));
  close();
  fs::resize_file(catalogue(), fs::file_size(catalogue()) - 1);
  open();
  EXPECT_EQ(found.size(), 1u);
  EXPECT_TRUE(found.contains(1));
  EXPECT_EQ(files("lost"), 1u);
  store->create(creation(2, 7000));
  open();
  EXPECT_EQ(found.size(), 2u);
}

TEST_F(StoreTest, InvalidRecordEndsTheCatalogue) {
  store->create(creation(1, 5000));
  close();
  std::ofstream(catalogue(), std::ios::app | std::ios::binary) << std::string(5000, '\0');
  open();
  EXPECT_EQ(found.size(), 1u);
  EXPECT_LT(fs::file_size(catalogue()), 1000u);
}

TEST_F(StoreTest, AnyDamageToTheCatalogueIsDetected) {
  for (uint64_t key : {1, 2, 3}) store->create(creation(key, 5000));
  store->remove(*store->create(creation(4, 5000)));
  const protocol::Id id = store->generation();
  close();
  std::string good(fs::file_size(catalogue()), '\0');
  std::ifstream(catalogue(), std::ios::binary).read(good.data(), good.size());
  for (uint64_t at = 0; at < good.size(); at += 7) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x40);
    std::ofstream(catalogue(), std::ios::binary | std::ios::trunc) << bad;
    SCOPED_TRACE(at);
    expect_error(ErrorKind::kUnavailable, {"journal"}, [&] { Catalogue::read(catalogue(), id); });
  }
}

TEST_F(StoreTest, TheCatalogueIsCompacted) {
  const uint64_t empty = fs::file_size(catalogue());
  for (uint64_t key = 1; key <= 50; ++key) store->remove(*store->create(creation(key, 5000)));
  EXPECT_GT(fs::file_size(catalogue()), empty);
  open();
  EXPECT_EQ(fs::file_size(catalogue()), empty);
}

TEST_F(StoreTest, ACatalogueThatCannotBeCompactedContinues) {
  close();
  store = Store::open({.directory = directory, .sync = true, .records = kSizes, .dead_records = 10},
                      memory::Pool::create({.capacity = 1 << 20}));
  const auto use = [this] {
    for (int i = 0; i < 30; ++i) store->remove(*store->create(creation(2, 1)));
    return fs::file_size(catalogue());
  };
  store->create(creation(1, 5000));
  const uint64_t shortened = use();
  fs::create_directory(catalogue() + ".new");
  const uint64_t grown = use();
  EXPECT_GT(grown, 2 * shortened);
  fs::remove(catalogue() + ".new");
  EXPECT_LT(use(), grown / 2);
  open();
  EXPECT_EQ(files(), 1u);
  EXPECT_TRUE(found.contains(1));
}

TEST_F(StoreTest, SecondServerIsRefused) {
  expect_error(ErrorKind::kUnavailable, {"another server", directory},
               [this] { open_store(directory); });
}

TEST_F(StoreTest, LeavesOtherDirectoriesAlone) {
  fs::create_directory(scratch / "mine");
  std::ofstream(scratch / "mine/thesis.tex") << "text";
  expect_error(ErrorKind::kInvalid, {"thesis.tex", "identity"},
               [this] { open_store(scratch / "mine"); });
  EXPECT_TRUE(fs::exists(scratch / "mine/thesis.tex"));
}

TEST_F(StoreTest, RefusesAnotherVersion) {
  close();
  std::ofstream(directory + "/identity")
      << "hbmcomm store, version 1, contents " << hex({1, 2}) << "\n";
  expect_error(ErrorKind::kUnavailable, {"identity", "version 1"}, [this] { open(); });
  std::ofstream(directory + "/identity") << "hbmcomm store, version 2, contents 00";
  expect_error(ErrorKind::kUnavailable, {"identity", "version"}, [this] { open(); });
}

TEST_F(StoreTest, RefusesDamagedRecords) {
  close();
  flip_byte(directory + "/sessions", 3);
  expect_error(ErrorKind::kUnavailable, {"sessions", "damaged"}, [this] { open(); });
  flip_byte(directory + "/sessions", 3);
  fs::resize_file(directory + "/operations", 5000);
  expect_error(ErrorKind::kUnavailable, {"operations", "damaged"}, [this] { open(); });
}

TEST_F(StoreTest, FailedCreationLeavesNoFile) {
  expect_error(ErrorKind::kExhausted, {}, [this] { store->create(creation(1, 2ull << 30)); });
  EXPECT_EQ(files(), 0u);
  for (const uint64_t bytes : {uint64_t{1} << 62, uint64_t{1} << 63, UINT64_MAX}) {
    expect_error(ErrorKind::kExhausted, {"pool", std::to_string(bytes)},
                 [&] { store->create(creation(1, bytes)); });
  }
  EXPECT_EQ(files(), 0u);
  open();
  EXPECT_TRUE(found.empty());
}

TEST_F(StoreTest, SessionsSurviveWithTheirOutcomes) {
  SessionRecord& session = store->records().open_session({3, 4});
  store->records().release_session(store->records().open_session({5, 6}));
  store->records().finish(session, {.number = 1, .value = 42});
  store->records().finish(session, {.number = 2, .value = 0, .status = protocol::Status::kRange});
  // Opens the store with room for fewer sessions, and with operations of other sizes.
  open({.sessions = 1, .operations = 7, .parts = 2, .chunk = 8192});
  const std::vector<SessionRecord*> sessions = store->records().sessions();
  ASSERT_EQ(sessions.size(), 1u);
  EXPECT_EQ(sessions[0]->id, (protocol::Id{3, 4}));
  EXPECT_EQ(sessions[0]->applied, 2u);
  EXPECT_EQ(sessions[0]->outcome(1)->value, 42);
  EXPECT_EQ(sessions[0]->outcome(2)->status, protocol::Status::kRange);
  EXPECT_EQ(sessions[0]->outcome(3), nullptr);
}

TEST_F(StoreTest, SessionsAreBounded) {
  std::vector<SessionRecord*> sessions;
  for (uint64_t i = 0; i < 4; ++i) sessions.push_back(&store->records().open_session({0, i}));
  expect_error(ErrorKind::kExhausted, {"4 sessions"},
               [this] { store->records().open_session({0, 9}); });
  store->records().release_session(*sessions[2]);
  SessionRecord& fresh = store->records().open_session({0, 9});
  EXPECT_EQ(fresh.applied, 0u);
}

TEST_F(StoreTest, FailingDiskEndsSessionsNotTheBox) {
  open(kSizes, true);
  SessionRecord& session = store->records().open_session({3, 4});
  disk_fails = true;
  expect_error(ErrorKind::kUnavailable, {"disk"},
               [this] { store->records().open_session({5, 6}); });
  disk_fails = false;
  EXPECT_EQ(store->records().sessions().size(), 1u);
  const BoxOperation operation{};
  expect_error(ErrorKind::kUnavailable, {"failed before"},
               [&] { store->records().begin(session, operation); });
}

TEST_F(StoreTest, WorksWithSyncing) {
  open(kSizes, true);
  SessionRecord& session = store->records().open_session({3, 4});
  const auto target = store->create(creation(1, 20'000));
  const auto source = store->create(creation(2, 20'000));
  std::fill_n(contents<float>(*source), 5000, 2.0f);
  Accumulator accumulator(store->records(), 2);
  accumulator.accumulate(session, 1, {*target, 0}, {*source, 0}, 20'000,
                         sum_of(Dtype::kFloat32, 3));
  EXPECT_EQ(accumulator.fetch_add(session, 2, {*source, 8}, 1), *contents<int64_t>(*source));
  store->remove(*source);
  open(kSizes, true);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(contents<float>(*found[1])[4999], 6.0f);
}

// A store as a killed server leaves it, with the records of an operation that has begun.
class InterruptedTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    target = store->create(creation(1, 5 * 4096));
    source = store->create(creation(2, 5 * 4096));
    std::fill_n(contents<int32_t>(*target), 5 * 1024, 100);
    std::fill_n(contents<int32_t>(*source), 5 * 1024, 1);
    session = &store->records().open_session({3, 4});
    const BoxOperation what{.opcode = protocol::Opcode::kAccumulate,
                            .parts = 2,
                            .number = 1,
                            .target = {target->stored->serial, 0},
                            .source = {source->stored->serial, 0},
                            .bytes = 5 * 4096,
                            .formula = sum_of(Dtype::kInt32)};
    begun = store->records().begin(*session, what);
    // Part 0 consists of steps 0 and 1, and has done step 0. Part 1 is executing step 2.
    std::fill_n(contents<int32_t>(*target), 1024, 101);
    begun.parts[0].progress = 2;
    std::fill_n(reinterpret_cast<int32_t*>(begun.undo + 4096), 1024, 100);
    begun.parts[1].progress = 1;
    std::fill_n(contents<int32_t>(*target) + 2048, 1024, -7);
  }

  void restart() {
    target.reset();
    source.reset();
    open();
  }

  // Expects that a copy of the store is refused, because `file` is damaged.
  void expect_refused(const std::string& file) {
    const std::string copy = scratch / "copy";
    fs::remove_all(copy);
    fs::copy(directory, copy, fs::copy_options::recursive);
    expect_error(ErrorKind::kUnavailable, {file, "damaged"}, [&] { open_store(copy, kSizes); });
  }

  void expect_target(int32_t value) {
    EXPECT_EQ(std::count(contents<int32_t>(*found[1]), contents<int32_t>(*found[1]) + 5120, value),
              5120);
  }

  std::shared_ptr<BoxSegment> target, source;
  SessionRecord* session = nullptr;
  Recorded begun;
};

TEST_F(InterruptedTest, IsExecuted) {
  restart();
  expect_target(101);
  ASSERT_EQ(store->records().sessions().size(), 1u);
  EXPECT_EQ(store->records().sessions()[0]->applied, 1u);
  open();
  expect_target(101);
}

TEST_F(InterruptedTest, IsNotExecutedAgain) {
  std::fill_n(contents<int32_t>(*target), 5 * 1024, 101);
  store->records().finish(*session, {.number = 1});  // the kill left the operation's record active
  restart();
  expect_target(101);
}

TEST_F(InterruptedTest, UsesADeletedSourcesFile) {
  const std::string path = source->stored->path;
  fs::create_hard_link(path, path + ".kept");
  store->remove(*source);
  source.reset();
  fs::rename(path + ".kept", path);  // a killed server would not have removed it
  restart();
  expect_target(101);
  EXPECT_EQ(files(), 1u);
  EXPECT_EQ(files("lost"), 0u);
}

TEST_F(InterruptedTest, IsDroppedWithItsTarget) {
  store->remove(*target);
  restart();
  EXPECT_FALSE(found.contains(1));
  EXPECT_EQ(store->records().sessions()[0]->applied, 1u);
  EXPECT_EQ(store->records().sessions()[0]->outcome(1)->status, protocol::Status::kInternal);
}

TEST_F(InterruptedTest, IsRefusedWhenDamaged) {
  begun.operation->what.bytes = 6 * 4096;
  expect_refused("operations");
  begun.operation->check = begun.operation->check_of();
  expect_refused("operations");
}

TEST_F(InterruptedTest, IsRefusedWhenItsFormulaIsDamaged) {
  begun.operation->what.formula.combine = static_cast<Combine>(2);
  expect_refused("operations");
  begun.operation->check = begun.operation->check_of();
  expect_refused("operations");
}

// With float64 as the source's type, the operation needs twice the bytes that the source has.
TEST_F(InterruptedTest, IsRefusedIfSourceIsTooShort) {
  begun.operation->what.formula = {.target = Dtype::kFloat32, .source = Dtype::kFloat64};
  begun.operation->check = begun.operation->check_of();
  expect_refused("operations");
}

// Assigns elements to elements that are half as wide. So a chunk of the target is assigned from
// twice as many bytes of the source.
TEST_F(InterruptedTest, AConversionIsExecuted) {
  constexpr uint64_t kCount = 2500, kAt = 100;
  const auto narrow = store->create(creation(3, 3 * 4096));
  const auto wide = store->create(creation(4, 3 * 8192));
  std::fill_n(contents<uint16_t>(*narrow), 6144, 7);
  for (uint64_t i = 0; i < 6144; ++i) contents<float>(*wide)[i] = static_cast<float>(i);
  const BoxOperation what{.opcode = protocol::Opcode::kAccumulate,
                          .number = 1,
                          .target = {narrow->stored->serial, 2 * kAt},
                          .source = {wide->stored->serial, 0},
                          .bytes = 2 * kCount,
                          .formula = {.target = Dtype::kBFloat16,
                                      .source = Dtype::kFloat32,
                                      .combine = Combine::kAssign,
                                      .scale = 2}};
  const Recorded conversion = store->records().begin(store->records().open_session({3, 5}), what);
  // The server was killed within the first step, which ends with the chunk.
  std::memcpy(conversion.undo, contents<uint16_t>(*narrow) + kAt, 4096 - 2 * kAt);
  conversion.parts[0].progress = 1;
  std::fill_n(contents<uint16_t>(*narrow) + kAt, 500, 9);
  restart();
  for (uint64_t i = 0; i < 6144; ++i) {
    const bool inside = i >= kAt && i < kAt + kCount;
    const uint16_t expected =
        inside ? reference::encode_bfloat16(2 * static_cast<float>(i - kAt)) : uint16_t{7};
    ASSERT_EQ(contents<uint16_t>(*found[3])[i], expected) << i;
  }
}

TEST_F(InterruptedTest, PartsBeyondTheirEndAreDamage) {
  begun.parts[1].progress = 99;
  expect_refused("operations");
}

TEST(MemoryStore, PreservesNothing) {
  const std::unique_ptr<Store> store = open_store("");
  EXPECT_FALSE(store->durable());
  EXPECT_TRUE(store->generation());
  EXPECT_NE(store->generation(), open_store("")->generation());
  const auto segment = store->create(creation(1, 5000));
  EXPECT_EQ(segment->stored, nullptr);
  EXPECT_EQ(contents<char>(*segment)[4999], 0);
  store->remove(*segment);
  EXPECT_TRUE(store->take_found().empty());
}

}  // namespace
}  // namespace hbm::box::server::storage
