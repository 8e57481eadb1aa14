// Stores in states that no box can leave. Each store is refused, with the name of the damaged file,
// and is not changed.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "expect_error.h"
#include "seeds.h"
#include "smb_store_copies.h"

namespace hbm::box::server::storage {
namespace {

namespace fs = std::filesystem;

struct Damage {
  std::string name;
  std::string said;  // the error contains it
  std::function<void(const fs::path&)> apply;
};

std::function<void(const fs::path&)> flip(const std::string& file, double part) {
  return [=](const fs::path& store) {
    std::string bytes = contents_of(store / file);
    const size_t at = static_cast<size_t>(static_cast<double>(bytes.size() - 1) * part);
    bytes[at] = static_cast<char>(bytes[at] ^ 0x10);
    write_contents(store / file, bytes);
  };
}

std::function<void(const fs::path&)> randomise(const std::string& file, size_t from) {
  return [=](const fs::path& store) {
    std::mt19937_64 random = test_random();
    std::string bytes = contents_of(store / file);
    for (size_t at = from; at < bytes.size(); ++at) bytes[at] = static_cast<char>(random());
    write_contents(store / file, bytes);
  };
}

std::vector<Damage> damages() {
  std::vector<Damage> all;
  for (const std::string file :
       {"journal", "sessions", "operations", "identity", "state", "lock"}) {
    all.push_back({file + " removed", file, [=](const fs::path& s) { fs::remove(s / file); }});
    all.push_back({file + " is a link", file, [=](const fs::path& s) {
                     fs::rename(s / file, s.parent_path() / "elsewhere");
                     fs::create_symlink(s.parent_path() / "elsewhere", s / file);
                   }});
    all.push_back({file + " is a directory", file, [=](const fs::path& s) {
                     fs::remove(s / file);
                     fs::create_directory(s / file);
                   }});
    if (file == "lock") continue;  // an intact lock file is empty
    all.push_back(
        {file + " empty", file, [=](const fs::path& s) { write_contents(s / file, ""); }});
    all.push_back({file + " flipped at its start", file, flip(file, 0)});
    all.push_back({file + " random", file, randomise(file, 0)});
  }
  for (const std::string file : {"journal", "sessions", "operations"}) {
    all.push_back({file + " of another store", file, [=](const fs::path& s) {
                     const FilledStore other(s.parent_path() / "other");
                     fs::copy_file(s.parent_path() / "other" / file, s / file,
                                   fs::copy_options::overwrite_existing);
                   }});
  }
  all.push_back({"sessions random after its head", "sessions", randomise("sessions", 4096)});
  all.push_back({"operations random after its head", "operations", randomise("operations", 4096)});
  for (const double part : {0.2, 0.4, 0.6, 0.8, 1.0}) {
    all.push_back({"journal flipped", "journal", flip("journal", part)});
  }
  all.push_back({"sessions short", "sessions", [](const fs::path& s) {
                   fs::resize_file(s / "sessions", fs::file_size(s / "sessions") - 4096);
                 }});
  all.push_back({"operations cut at a record", "operations",
                 [](const fs::path& s) { fs::resize_file(s / "operations", 8192); }});
  all.push_back({"journal of an earlier time", "journal", [](const fs::path& s) {
                   fs::resize_file(s / "journal", fs::file_size(s / "journal") - 3 * 72);
                 }});
  all.push_back(
      {"segments removed", "segments", [](const fs::path& s) { fs::remove_all(s / "segments"); }});
  all.push_back(
      {"a segment removed", "2.0000", [](const fs::path& s) { fs::remove(segment_file(s, 2)); }});
  all.push_back({"a segment cut", "2.0000", [](const fs::path& s) {
                   const fs::path file = segment_file(s, 2);
                   fs::resize_file(file, fs::file_size(file) - 1);
                 }});
  all.push_back({"a segment grown", "2.0000", [](const fs::path& s) {
                   const fs::path file = segment_file(s, 2);
                   fs::resize_file(file, fs::file_size(file) + 4096);
                 }});
  all.push_back({"a segment is a link", "2.0000", [](const fs::path& s) {
                   const fs::path file = segment_file(s, 2), away = s.parent_path() / "elsewhere";
                   fs::rename(file, away);
                   fs::create_symlink(away, file);
                 }});
  all.push_back({"a segment is a pipe", "2.0000", [](const fs::path& s) {
                   const fs::path file = segment_file(s, 2);
                   fs::remove(file);
                   EXPECT_EQ(mkfifo(file.c_str(), 0600), 0);
                 }});
  all.push_back({"two segments swapped", ".0000", [](const fs::path& s) {
                   const fs::path one = segment_file(s, 1), two = segment_file(s, 2);
                   fs::rename(one, s / "segments" / "x");
                   fs::rename(two, one);
                   fs::rename(s / "segments" / "x", two);
                 }});
  all.push_back({"a segment of another store", ".0000", [](const fs::path& s) {
                   const FilledStore other(s.parent_path() / "other");
                   fs::copy_file(segment_file(s.parent_path() / "other", 2), segment_file(s, 2),
                                 fs::copy_options::overwrite_existing);
                 }});
  all.push_back({"a segment that the catalogue lacks", "journal", [](const fs::path& s) {
                   std::string name = segment_file(s, 2).filename();
                   name.replace(name.size() - 2, 2, "99");
                   fs::copy_file(segment_file(s, 2), s / "segments" / name);
                 }});
  all.push_back({"a stray file", "thesis.tex",
                 [](const fs::path& s) { write_contents(s / "thesis.tex", "text"); }});
  all.push_back({"a stray file among the segments", "thesis.tex",
                 [](const fs::path& s) { write_contents(s / "segments" / "thesis.tex", "text"); }});
  return all;
}

void expect_refused(const fs::path& store, const Damage& damage) {
  SCOPED_TRACE(damage.name);
  damage.apply(store);
  const auto before = snapshot(store);
  try {
    open_store(store, kFewRecords);
    ADD_FAILURE() << "the store is served";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(damage.said), std::string::npos) << error.what();
  }
  EXPECT_TRUE(snapshot(store) == before) << "the store was changed";
}

TEST(DamagedStore, IsRefusedUnchangedAfterAKill) {
  for (const Damage& damage : damages()) {
    const Scratch scratch;
    const FilledStore filled(scratch.store());
    filled.copy_to(scratch / "copy");
    expect_refused(scratch / "copy", damage);
  }
}

void close_store(FilledStore& filled) {
  filled.segments.clear();
  filled.store->close();
}

TEST(DamagedStore, IsRefusedUnchangedAfterAnOrderlyEnd) {
  std::vector<Damage> all = damages();
  for (const uint64_t key : {1, 2, 3}) {
    all.push_back(
        {"a bit of a segment", ".000000000000000" + std::to_string(key), [=](const fs::path& s) {
           const fs::path file = segment_file(s, key);
           flip(fs::relative(file, s), 0.3)(s);
         }});
  }
  for (const double part : {0.0, 0.5, 1.0}) {
    all.push_back({"a bit of `checksums`", "checksums", flip("checksums", part)});
  }
  all.push_back(
      {"checksums removed", "checksums", [](const fs::path& s) { fs::remove(s / "checksums"); }});
  const Scratch scratch;
  FilledStore filled(scratch.store());
  close_store(filled);
  filled.store.reset();
  for (const Damage& damage : all) {
    const Scratch copy;
    fs::copy(scratch.store(), copy.store(), fs::copy_options::recursive);
    expect_refused(copy.store(), damage);
  }
}

TEST(DamagedStore, ChecksumsMatchSha256sum) {
  const Scratch scratch;
  FilledStore filled(scratch.store());
  close_store(filled);
  const std::string command = "cd " + scratch.store() + " && sha256sum --quiet --check checksums";
  EXPECT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(std::ranges::count(contents_of(scratch / "store/checksums"), '\n'), 6);
}

// A process that has mapped a segment may change it while no box runs. So an orderly end stores no
// checksum of a mapped segment.
TEST(DamagedStore, MappedSegmentHasNoChecksum) {
  const Scratch scratch;
  FilledStore filled(scratch.store());
  const auto mapped = filled.segments[2];
  filled.segments.clear();
  filled.store->close();
  contents<char>(*mapped)[5] = filled.data[3][5] = 'x';
  filled.store.reset();
  filled.expect_in(*open_store(scratch.store(), kFewRecords));
}

// After a kill, the data of segments have no checksums.
TEST(DamagedStore, SegmentDataIsUnverifiedAfterAKill) {
  const Scratch scratch;
  FilledStore filled(scratch.store());
  filled.copy_to(scratch / "copy");
  const std::string copy = scratch / "copy";
  const fs::path file = segment_file(copy, 3);
  std::string bytes = contents_of(file);
  bytes[100] = static_cast<char>(bytes[100] ^ 1);
  write_contents(file, bytes);
  filled.data[3] = bytes.substr(0, kStoredBytes);
  testing::internal::CaptureStderr();
  filled.expect_in(*open_store(copy, kFewRecords));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("contents of 3 of its segments cannot be checked"), std::string::npos)
      << said;
}

}  // namespace
}  // namespace hbm::box::server::storage
