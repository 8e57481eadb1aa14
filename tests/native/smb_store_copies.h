// Copies of stores, in the state after a kill or after an orderly end. Tests damage them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "box/server/storage/store.h"
#include "seeds.h"
#include "smb_store_fixture.h"

namespace hbm::box {

inline constexpr server::storage::RecordSizes kFewRecords{
    .sessions = 4, .operations = 2, .parts = 4, .chunk = 4096};
inline constexpr uint64_t kStoredBytes = 10'000;  // of each segment

inline std::string contents_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_contents(const std::filesystem::path& path, const std::string& contents) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << contents;
}

// Returns the type, and the data or the link, of all entries below a directory, by path.
inline std::map<std::string, std::string> snapshot(const std::filesystem::path& directory) {
  namespace fs = std::filesystem;
  std::map<std::string, std::string> found;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(directory)) {
    std::string& what = found[fs::relative(entry.path(), directory)];
    if (entry.is_symlink()) {
      what = "link to " + fs::read_symlink(entry.path()).native();
    } else if (entry.is_regular_file()) {
      what = "file " + contents_of(entry.path());
    } else {
      what = "of another type";
    }
  }
  return found;
}

// A store with three segments of random bytes, a deleted fourth, and a session that has executed 70
// requests.
class FilledStore {
 public:
  explicit FilledStore(const std::string& directory, bool sync = false)
      : store(open_store(directory, kFewRecords, sync)) {
    std::mt19937_64 random = test_random();
    for (uint64_t key : {1, 2, 3}) {
      segments.push_back(store->create(creation(key, kStoredBytes)));
      std::string& bytes = data[key];
      for (uint64_t i = 0; i < kStoredBytes; ++i) bytes += static_cast<char>(random());
      std::copy(bytes.begin(), bytes.end(), contents<char>(*segments.back()));
    }
    store->remove(*store->create(creation(4, kStoredBytes)));
    server::storage::SessionRecord& session = store->records().open_session({3, 4});
    for (uint64_t number = 1; number <= 70; ++number) {
      store->records().finish(session, {.number = number, .value = static_cast<int64_t>(number)});
    }
  }

  // Copies the state that a kill would leave now.
  void copy_to(const std::string& directory) const {
    std::filesystem::remove_all(directory);
    std::filesystem::copy(path_of(*store), directory, std::filesystem::copy_options::recursive);
  }

  // Expects this store's data and session in `opened`.
  void expect_in(server::storage::Store& opened) const {
    std::map<uint64_t, std::string> found;
    for (const auto& segment : opened.take_found()) {
      found[segment->key.low] = {contents<char>(*segment), segment->size};
    }
    EXPECT_EQ(found, data);
    const std::vector<server::storage::SessionRecord*> sessions = opened.records().sessions();
    ASSERT_EQ(sessions.size(), 1u);
    EXPECT_EQ(sessions[0]->id, (protocol::Id{3, 4}));
    EXPECT_EQ(sessions[0]->applied, 70u);
    ASSERT_NE(sessions[0]->outcome(69), nullptr);
    EXPECT_EQ(sessions[0]->outcome(69)->value, 69);
  }

  std::unique_ptr<server::storage::Store> store;
  std::vector<std::shared_ptr<server::storage::BoxSegment>> segments;
  std::map<uint64_t, std::string> data;  // by key

 private:
  std::string path_of(const server::storage::Store&) const {
    return std::filesystem::path(segments[0]->stored->path).parent_path().parent_path();
  }
};

// Returns the file of segment `key` of a FilledStore.
inline std::filesystem::path segment_file(const std::filesystem::path& directory, uint64_t key) {
  const std::string start = "000000000000000" + std::to_string(1) + "000000000000000";
  for (const auto& entry : std::filesystem::directory_iterator(directory / "segments")) {
    if (entry.path().filename().native().starts_with(start + std::to_string(key))) return entry;
  }
  ADD_FAILURE() << "no file of segment " << key;
  return {};
}

}  // namespace hbm::box
