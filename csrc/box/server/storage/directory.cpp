#include "box/server/storage/directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/log.h"
#include "box/protocol/proof.h"
#include "box/server/storage/files.h"

namespace hbm::box::server::storage {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStore = "hbmcomm store, version ";
constexpr const char* kIdentity = "hbmcomm store, version 2, contents ";
constexpr const char* kUnfinished = ".new";  // suffix of a file that will replace another
constexpr std::array kFiles = {"identity",   "state",     "journal", "sessions",
                               "operations", "checksums", "lock"};
constexpr std::array kSubdirectories = {"segments", "lost"};
constexpr size_t kIdDigits = 32;
constexpr size_t kSerialDigits = 16;

bool read_hex(std::string_view text, uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return error == std::errc() && end == text.data() + text.size();
}

bool read_hex(std::string_view text, protocol::Id& id) {
  return text.size() == kIdDigits && read_hex(text.substr(0, 16), id.high) &&
         read_hex(text.substr(16), id.low);
}

// Returns the serial number in the name of a segment file, or 0 for any other name.
uint64_t serial_of(std::string_view name) {
  protocol::Id key;
  uint64_t serial = 0;
  const bool ours = name.size() == kIdDigits + 1 + kSerialDigits && name[kIdDigits] == '.' &&
                    read_hex(name.substr(0, kIdDigits), key) &&
                    read_hex(name.substr(kIdDigits + 1), serial);
  return ours ? serial : 0;
}

bool among(const auto& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void require_type(const fs::directory_entry& entry, fs::file_type type) {
  if (entry.symlink_status().type() == type) return;
  throw damaged(entry.path(), type == fs::file_type::regular
                                  ? "it is not a file, or a link to one"
                                  : "it is not a directory, or a link to one");
}

std::map<uint64_t, std::string> files_in(const std::string& directory) {
  std::map<uint64_t, std::string> files;
  if (!fs::exists(directory)) return files;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const uint64_t serial = serial_of(entry.path().filename().native());
    if (serial == 0) throw damaged(entry.path(), "no box gives a file this name");
    require_type(entry, fs::file_type::regular);
    if (!files.emplace(serial, entry.path()).second) {
      throw damaged(entry.path(), "another segment has its number");
    }
  }
  return files;
}

void make_directory(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) {
    throw Error(ErrorKind::kUnavailable, "cannot make " + path + ": " + error.message());
  }
}

}  // namespace

std::string hex(const protocol::Id& id) {
  std::array<char, kIdDigits + 1> text;
  std::snprintf(text.data(), text.size(), "%016" PRIx64 "%016" PRIx64, id.high, id.low);
  return text.data();
}

Directory::Directory(const std::string& path, bool sync) : path_(path), sync_(sync) {
  if (!fs::exists(path_)) {
    make_directory(path_);
    fs::permissions(path_, fs::perms::owner_all);
  }
  if (!fs::is_directory(path_)) {
    throw Error(ErrorKind::kInvalid, path_ + " is not a directory: choose an empty one");
  }
  const std::string identity = path_ + "/identity";
  require_known_files();
  lock(!fs::exists(identity));
  require_known_files();
  if (!fs::exists(identity)) make_identity();
  read_identity();
}

// A directory without `identity` is accepted as a new store only if it has no files except `lock`
// and an unfinished `identity`.
void Directory::require_known_files() const {
  const bool identified = fs::exists(path_ + "/identity");
  for (const fs::directory_entry& entry : fs::directory_iterator(path_)) {
    const std::string name = entry.path().filename();
    const std::string last = name.ends_with(kUnfinished) ? name.substr(0, name.size() - 4) : name;
    if (!identified && last != "lock" && last != "identity") {
      throw Error(ErrorKind::kInvalid,
                  path_ + " is not the store of a memory box: it has no file " +
                      "`identity`, and has " + name + "; choose an empty directory");
    }
    if (among(kSubdirectories, name)) {
      require_type(entry, fs::file_type::directory);
    } else if (among(kFiles, last)) {
      // An unfinished replacement may be of any type.
      if (name == last) require_type(entry, fs::file_type::regular);
    } else {
      throw Error(ErrorKind::kUnavailable,
                  path_ + " has " + name + ", which is not a file of a store: move it elsewhere; " +
                      "nothing in the store was changed");
    }
  }
}

void Directory::lock(bool make) {
  const std::string file = path_ + "/lock";
  if (!make && !fs::exists(file)) throw damaged(file, "it is missing");
  Descriptor opened = open_file(file, O_RDWR | (make ? O_CREAT : 0));
  if (flock(opened.get(), LOCK_EX | LOCK_NB) != 0) {
    throw Error(ErrorKind::kUnavailable, "another server uses the store " + path_ + " (it holds " +
                                             file + "); stop it, or choose another directory");
  }
  lock_ = std::move(opened);
}

void Directory::make_identity() const {
  const std::string file = path_ + "/identity";
  const std::string text = kIdentity + hex(protocol::random_id()) + "\n";
  {
    const Descriptor fresh = open_file(file + kUnfinished, O_WRONLY | O_CREAT | O_TRUNC);
    write_file(fresh.get(), text.data(), text.size(), file);
  }
  replace_file(file + kUnfinished, file, true);
}

void Directory::read_identity() {
  const std::string file = path_ + "/identity";
  const std::vector<std::byte> bytes = whole_file(file);
  const std::string found(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::string_view start = kIdentity;
  if (found.starts_with(start) && found.size() == start.size() + kIdDigits + 1 &&
      read_hex(std::string_view(found).substr(start.size(), kIdDigits), generation_)) {
    return;
  }
  if (found.starts_with(kStore) && !found.starts_with(start)) {
    const std::string rest = found.substr(std::string_view(kStore).size());
    throw Error(ErrorKind::kUnavailable,
                "the store " + path_ + " has version " + rest.substr(0, rest.find(',')) +
                    " by its file `identity`, and this program uses version 2 alone: serve it " +
                    "with the release that made it, or choose another directory; nothing in it " +
                    "was changed");
  }
  throw damaged(file, "it should be \"" + std::string(kIdentity) +
                          "...\": another program wrote it, or another version of this one");
}

bool Directory::is_new() const {
  if (fs::exists(state())) return false;
  for (const fs::directory_entry& entry : fs::directory_iterator(path_)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("identity") && name != "lock" && name != "state.new") {
      throw damaged(state(), "it is missing");
    }
  }
  return true;
}

void Directory::make_segments() const { make_directory(segments()); }

std::string Directory::segment_name(const protocol::Id& key, uint64_t serial) const {
  std::array<char, kSerialDigits + 1> text;
  std::snprintf(text.data(), text.size(), "%016" PRIx64, serial);
  return "segments/" + hex(key) + "." + text.data();
}

std::string Directory::segment_file(const protocol::Id& key, uint64_t serial) const {
  return path_ + "/" + segment_name(key, serial);
}

std::map<uint64_t, std::string> Directory::segment_files() const {
  if (!fs::exists(segments())) throw damaged(segments(), "it is missing");
  return files_in(segments());
}

uint64_t Directory::last_serial() const {
  uint64_t last = 0;
  for (const std::string& directory : {segments(), lost()}) {
    const std::map<uint64_t, std::string> files = files_in(directory);
    if (!files.empty()) last = std::max(last, files.rbegin()->first);
  }
  return last;
}

Descriptor Directory::make_segment(const std::string& file, uint64_t bytes) const {
  Descriptor made = open_file(file, O_RDWR | O_CREAT | O_EXCL);
  resize_file(made.get(), bytes_with_footer(bytes), file);
  return made;
}

void Directory::reserve_segment(int fd, const std::string& file,
                                const SegmentFooter& footer) const {
  reserve_file(fd, bytes_with_footer(footer.size), file);
  write_footer(fd, footer, file);
  if (!sync_) return;
  sync_file(fd, file);
  sync_segments();
}

void Directory::discard(const std::string& file, bool keep) const {
  if (keep) {
    make_directory(lost());
    replace_file(file, lost() + "/" + fs::path(file).filename().native(), sync_);
    log::warn("kept " + file + ", which the catalogue does not name any more, in " + lost());
  } else {
    fs::remove(file);
  }
}

void Directory::sync_segments() const { sync_directory(segments()); }

void Directory::remove_leftovers() const {
  std::error_code ignored;  // leftovers do no harm
  fs::remove(path_ + "/checksums", ignored);
  for (const char* name : kFiles) fs::remove(path_ + "/" + name + kUnfinished, ignored);
}

}  // namespace hbm::box::server::storage
