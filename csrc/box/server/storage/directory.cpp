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

namespace hbm::box {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIdentity = "hbmcomm store, version 1, contents ";
constexpr size_t kIdDigits = 32;
constexpr size_t kSerialDigits = 16;

bool read_hex(std::string_view text, uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return error == std::errc() && end == text.data() + text.size();
}

bool read_hex(std::string_view text, smb::Id& id) {
  return text.size() == kIdDigits && read_hex(text.substr(0, 16), id.high) &&
         read_hex(text.substr(16), id.low);
}

// The serial number in the name of a segment's file; 0: it is another file.
uint64_t serial_of(std::string_view name) {
  smb::Id key;
  uint64_t serial = 0;
  const bool ours = name.size() == kIdDigits + 1 + kSerialDigits && name[kIdDigits] == '.' &&
                    read_hex(name.substr(0, kIdDigits), key) &&
                    read_hex(name.substr(kIdDigits + 1), serial);
  return ours ? serial : 0;
}

std::string contents_of(const std::string& path) {
  const Descriptor file = open_file(path, O_RDONLY);
  std::string text(256, '\0');
  text.resize(read_file(file.get(), text.data(), text.size(), path));
  return text;
}

std::map<uint64_t, std::string> files_in(const std::string& folder) {
  std::map<uint64_t, std::string> files;
  if (!fs::exists(folder)) return files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const uint64_t serial = serial_of(entry.path().filename().native());
    if (serial != 0) files.emplace(serial, entry.path());
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

std::string hex(const smb::Id& id) {
  std::array<char, kIdDigits + 1> text;
  std::snprintf(text.data(), text.size(), "%016" PRIx64 "%016" PRIx64, id.high, id.low);
  return text.data();
}

Directory::Directory(const std::string& path, bool sync) : path_(path), sync_(sync) {
  if (!fs::exists(path_)) {
    make_directory(path_);
    fs::permissions(path_, fs::perms::owner_all);
  }
  lock();
  identify();
  make_directory(segments());
  if (sync_) sync_directory(path_);
}

void Directory::lock() {
  const std::string file = path_ + "/lock";
  Descriptor opened = open_file(file, O_RDWR | O_CREAT);
  if (flock(opened.get(), LOCK_EX | LOCK_NB) != 0) {
    throw Error(ErrorKind::kUnavailable, "another server uses the store " + path_ + " (it holds " +
                                             file + "); stop it, or choose another directory");
  }
  lock_ = std::move(opened);
}

void Directory::identify() {
  const std::string file = path_ + "/identity";
  if (!fs::exists(file)) {
    for (const fs::directory_entry& entry : fs::directory_iterator(path_)) {
      const std::string name = entry.path().filename();
      if (name == "lock" || name == "identity.new") continue;
      throw Error(ErrorKind::kInvalid,
                  path_ + " is not the store of a memory box: it has no file " +
                      "`identity`, and has " + name + "; choose an empty directory");
    }
    const std::string text = kIdentity + hex(smb::random_id()) + "\n";
    const Descriptor fresh = open_file(file + ".new", O_WRONLY | O_CREAT | O_TRUNC);
    write_file(fresh.get(), text.data(), text.size(), file);
    replace_file(file + ".new", file, sync_);
  }
  const std::string found = contents_of(file);
  const std::string_view start = kIdentity;
  const bool known = found.starts_with(start) && found.size() == start.size() + kIdDigits + 1 &&
                     read_hex(std::string_view(found).substr(start.size(), kIdDigits), contents_);
  if (!known) {
    throw Error(ErrorKind::kUnavailable,
                file + " is damaged, or of another version of the program: expected \"" +
                    kIdentity + "...\"");
  }
}

std::string Directory::segment_file(const smb::Id& key, uint64_t serial) const {
  std::array<char, kSerialDigits + 1> text;
  std::snprintf(text.data(), text.size(), "%016" PRIx64, serial);
  return segments() + "/" + hex(key) + "." + text.data();
}

std::map<uint64_t, std::string> Directory::segment_files() const { return files_in(segments()); }

uint64_t Directory::last_serial() const {
  uint64_t last = 0;
  for (const std::string& folder : {segments(), lost()}) {
    const std::map<uint64_t, std::string> files = files_in(folder);
    if (!files.empty()) last = std::max(last, files.rbegin()->first);
  }
  return last;
}

Descriptor Directory::make_segment(const std::string& file, uint64_t bytes) const {
  Descriptor made = open_file(file, O_RDWR | O_CREAT | O_EXCL);
  resize_file(made.get(), bytes, file);
  return made;
}

void Directory::reserve_segment(int fd, const std::string& file, uint64_t bytes) const {
  reserve_file(fd, bytes, file);
  if (!sync_) return;
  sync_file(fd, file);
  sync_directory(segments());
}

void Directory::discard(const std::string& file, bool keep) const {
  if (keep) {
    make_directory(lost());
    replace_file(file, lost() + "/" + fs::path(file).filename().native(), sync_);
    log::warn("kept " + file + ", which the damaged journal does not name, in " + lost());
  } else {
    fs::remove(file);
  }
}

}  // namespace hbm::box
