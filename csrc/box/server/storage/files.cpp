#include "box/server/storage/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"

namespace hbm::box {
namespace {

[[noreturn]] void fail(const std::string& asked, int number) {
  const bool full = number == ENOSPC || number == EDQUOT || number == EFBIG;
  throw Error(full ? ErrorKind::kExhausted : ErrorKind::kUnavailable,
              "cannot " + asked + ": " + std::strerror(number));
}

}  // namespace

Descriptor open_file(const std::string& path, int flags) {
  Descriptor file(open(path.c_str(), flags | O_CLOEXEC, 0600));
  if (!file) fail("open " + path, errno);
  return file;
}

uint64_t file_bytes(int fd, const std::string& path) {
  struct stat status{};
  if (fstat(fd, &status) != 0) fail("look at " + path, errno);
  return static_cast<uint64_t>(status.st_size);
}

void reserve_file(int fd, uint64_t bytes, const std::string& path) {
  const std::string asked = "reserve " + std::to_string(bytes) + " bytes for " + path;
  int result;
  do {
    result = fallocate(fd, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EOPNOTSUPP) fail(asked, errno);
  static const bool said [[maybe_unused]] = [&] {
    log::warn("the file system of " + path +
              " reserves no room: if it fills up, the box is killed");
    return true;
  }();
  if (file_bytes(fd, path) < bytes) resize_file(fd, bytes, path);
}

size_t read_file(int fd, void* bytes, size_t size, const std::string& path) {
  size_t got = 0;
  while (got < size) {
    const ssize_t more = read(fd, static_cast<char*>(bytes) + got, size - got);
    if (more < 0 && errno == EINTR) continue;
    if (more < 0) fail("read " + path, errno);
    if (more == 0) break;
    got += static_cast<size_t>(more);
  }
  return got;
}

void write_file(int fd, const void* bytes, size_t size, const std::string& path) {
  const auto* at = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t written = write(fd, at, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("write to " + path, written < 0 ? errno : ENOSPC);
    at += written;
    size -= static_cast<size_t>(written);
  }
}

void resize_file(int fd, uint64_t bytes, const std::string& path) {
  if (ftruncate(fd, static_cast<off_t>(bytes)) == 0) return;
  fail("give " + path + " " + std::to_string(bytes) + " bytes", errno);
}

void sync_file(int fd, const std::string& path) {
  if (fdatasync(fd) != 0) fail("write " + path + " to the disk", errno);
}

void replace_file(const std::string& from, const std::string& path, bool sync) {
  if (sync) sync_file(open_file(from, O_RDONLY).get(), from);
  if (std::rename(from.c_str(), path.c_str()) != 0) fail("rename " + from + " to " + path, errno);
  if (sync) sync_directory(std::filesystem::path(path).parent_path());
}

void sync_directory(const std::string& path) {
  const Descriptor directory = open_file(path, O_RDONLY | O_DIRECTORY);
  if (fsync(directory.get()) != 0) fail("write " + path + " to the disk", errno);
}

}  // namespace hbm::box
