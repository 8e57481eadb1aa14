// The states in which a stop of the box or of the machine can leave a store. docs/memory-box.md
// lists them, and the box's reaction to each state.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/boot_id.h"
#include "box/server/storage/directory.h"
#include "box/server/storage/store_state.h"
#include "expect_error.h"
#include "smb_store_copies.h"

namespace hbm::box::server::storage {
namespace {

namespace fs = std::filesystem;

using Change = std::function<void(const fs::path&)>;

// Changes a store as if another boot of the machine had written it.
void reboot(const fs::path& store, const protocol::Id& generation, bool sync) {
  StoreState state = read_state(store / "state", generation);
  EXPECT_EQ(state.sync, sync);
  EXPECT_EQ(state.boot, boot_id());
  state.boot = "another";
  write_state(store / "state", generation, state);
}

class CrashStates : public testing::Test {
 protected:
  fs::path killed(const FilledStore& filled) const {
    filled.copy_to(scratch / "copy");
    return scratch / "copy";
  }

  void expect_served(const FilledStore& filled, const Change& change, bool rebooted = false) {
    const fs::path copy = killed(filled);
    change(copy);
    if (rebooted) reboot(copy, filled.store->generation(), filled.store->records().sync());
    filled.expect_in(*open_store(copy, kFewRecords));
  }

  const Scratch scratch;
};

// Imitates kills during a store's first start: before the start has made each of its files, and
// after the last file.
TEST_F(CrashStates, KillDuringTheFirstStartIsSurvived) {
  const std::vector<std::string> order = {"lock",     "identity",   "state",  "segments",
                                          "sessions", "operations", "journal"};
  open_store(scratch / "made");
  const protocol::Id generation = open_store(scratch / "made")->generation();
  for (size_t made = 0; made <= order.size(); ++made) {
    const fs::path store = scratch / ("part" + std::to_string(made));
    fs::create_directory(store);
    for (size_t i = 0; i < made; ++i) {
      fs::copy(scratch / ("made/" + order[i]), store / order[i], fs::copy_options::recursive);
    }
    if (made > 2) write_state(store / "state", generation, StoreState());
    if (made < order.size()) write_contents(store / (order[made] + ".new"), "half");
    if (made == 0 || order[made == order.size() ? 0 : made] == "segments") {
      fs::remove(store / (order[made] + ".new"));
    }
    SCOPED_TRACE(made);
    const auto opened = open_store(store);
    opened->create(creation(1, 5000));
    EXPECT_TRUE(opened->take_found().empty());
  }
}

TEST_F(CrashStates, AKillAtAnyTime) {
  const FilledStore filled(scratch.store());
  expect_served(filled, [](const fs::path&) {});
  for (const std::string file :
       {"identity", "state", "journal", "sessions", "operations", "checksums"}) {
    SCOPED_TRACE(file);
    expect_served(filled, [&](const fs::path& s) { write_contents(s / (file + ".new"), "half"); });
  }
  // The box was killed in an orderly end, while it wrote the checksums.
  expect_served(filled, [](const fs::path& s) { write_contents(s / "checksums", "anything"); });
  // The box was killed while it created a segment: before the file had disk space, after that, or
  // after the footer was written.
  const fs::path footer = scratch / "footer";
  fs::copy_file(segment_file(scratch.store(), 1), footer);
  const std::string bytes = contents_of(footer);
  const std::string name = "0000000000000001000000000000000a.0000000000000009";
  for (const std::string& half :
       {std::string(), std::string(bytes.size(), '\0'),
        std::string(bytes.size() - 4096, '\0') + bytes.substr(bytes.size() - 4096)}) {
    expect_served(filled, [&](const fs::path& s) { write_contents(s / "segments" / name, half); });
    EXPECT_FALSE(fs::exists(scratch / ("copy/segments/" + name)));
  }
}

TEST_F(CrashStates, TornLastCatalogueRecordIsIgnored) {
  const FilledStore filled(scratch.store());
  const std::string catalogue = contents_of(scratch / "store/journal");
  const std::string record = catalogue.substr(catalogue.size() - 72);
  for (size_t part : {1, 40, 71}) {
    expect_served(filled, [&](const fs::path& s) {
      write_contents(s / "journal", catalogue + record.substr(0, part));
    });
  }
}

// The segment was in use when it was deleted, so its file was still there when the box was killed.
TEST_F(CrashStates, LeftoverFileOfADeletedSegmentIsRemoved) {
  const Scratch another;
  const FilledStore filled(scratch.store());
  const auto deleted = filled.store->create(creation(5, kStoredBytes));
  contents<char>(*deleted)[77] = 'x';
  filled.store->remove(*deleted);
  expect_served(filled, [](const fs::path&) {});
  EXPECT_EQ(std::distance(fs::directory_iterator(scratch / "copy/segments"), {}), 3);
}

TEST_F(CrashStates, CatalogueShortenedAfterADeletionIsServed) {
  const FilledStore filled(scratch.store());
  filled.copy_to(scratch / "short");
  const auto store =
      Store::open({.directory = scratch / "short", .records = kFewRecords, .dead_records = 5},
                  memory::Pool::create({.capacity = 1 << 20}));
  store->take_found();
  const auto deleted = store->create(creation(5, kStoredBytes));
  contents<char>(*deleted)[77] = 'x';
  store->remove(*deleted);
  for (int i = 0; i < 20; ++i) store->remove(*store->create(creation(6, 1)));
  fs::remove_all(scratch / "copy");
  fs::copy(scratch / "short", scratch / "copy", fs::copy_options::recursive);
  filled.expect_in(*open_store(scratch / "copy", kFewRecords));
}

TEST_F(CrashStates, MachineStopWithSyncingIsSurvived) {
  const FilledStore filled(scratch.store(), true);
  const std::string catalogue = contents_of(scratch / "store/journal");
  expect_served(filled, [](const fs::path&) {}, true);
  // When the machine stopped, the new size of `journal` was on the disk, but not its last bytes.
  expect_served(
      filled,
      [&](const fs::path& s) { write_contents(s / "journal", catalogue + std::string(72, '\0')); },
      true);
  // With syncing, data are on the disk before the reply to a request. So a missing file is damage,
  // and the store is refused.
  const fs::path copy = killed(filled);
  fs::remove(segment_file(copy, 2));
  reboot(copy, filled.store->generation(), true);
  expect_error(ErrorKind::kUnavailable, {"damaged", "2.0000"},
               [&] { open_store(copy, kFewRecords, true); });
}

// The kernel writes pages in any order. So a stop of the machine may lose the last records of
// `journal`, files of segments that `journal` names, and pages of `sessions`. The box serves the
// remaining data, and logs the losses.
TEST_F(CrashStates, AStopOfTheMachineWithoutSyncing) {
  const FilledStore filled(scratch.store());
  const auto open_lossy = [&](const Change& change) {
    const fs::path copy = killed(filled);
    change(copy);
    reboot(copy, filled.store->generation(), false);
    testing::internal::CaptureStderr();
    const auto store = open_store(copy, kFewRecords);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("the machine stopped"), std::string::npos) << said;
    std::map<uint64_t, std::string> found;
    for (const auto& one : store->take_found()) {
      found[one->key.low] = {contents<char>(*one), one->size};
    }
    return std::pair(found, store->records().sessions().size());
  };
  const auto without = [&](uint64_t key) {
    std::map<uint64_t, std::string> some = filled.data;
    some.erase(key);
    return some;
  };
  EXPECT_EQ(open_lossy([](const fs::path&) {}), std::pair(filled.data, size_t{1}));
  EXPECT_EQ(open_lossy([](const fs::path& s) { fs::remove(segment_file(s, 2)); }).first,
            without(2));
  EXPECT_EQ(open_lossy([](const fs::path& s) {
              fs::resize_file(s / "journal", fs::file_size(s / "journal") - 3 * 72);
            }).first,
            without(3));
  EXPECT_EQ(std::distance(fs::directory_iterator(scratch / "copy/lost"), {}), 1);
  EXPECT_EQ(open_lossy([](const fs::path& s) {
              std::string bytes = contents_of(s / "sessions");
              bytes.replace(4096 + 200, 400, 400, '\0');
              write_contents(s / "sessions", bytes);
            }).second,
            0u);
}

TEST_F(CrashStates, OrderlyEndIsServed) {
  FilledStore filled(scratch.store());
  filled.segments.clear();
  filled.store->close();
  filled.store.reset();
  testing::internal::CaptureStderr();
  filled.expect_in(*open_store(scratch.store(), kFewRecords));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace hbm::box::server::storage
