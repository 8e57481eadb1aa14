#include "box/server/storage/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/log.h"
#include "box/server/storage/tuning.h"

namespace hbm::box::server::storage {
namespace {

[[noreturn]] void fail(const std::string& asked, int number) {
  const bool full = number == ENOSPC || number == EDQUOT || number == EFBIG;
  throw Error(full ? ErrorKind::kExhausted : ErrorKind::kUnavailable,
              "cannot " + asked + ": " + std::strerror(number));
}

std::byte* map(int fd, uint64_t bytes, const std::string& what) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (base != MAP_FAILED) return static_cast<std::byte*>(base);
  const char* cause = std::strerror(errno);
  throw Error(ErrorKind::kExhausted,
              "cannot map " + std::to_string(bytes) + " bytes of " + what + ": " + cause);
}

}  // namespace

Error damaged(const std::string& path, const std::string& found) {
  return {ErrorKind::kUnavailable,
          path + " is damaged: " + found +
              "; nothing in the store was changed: restore a whole copy of it, or choose an empty "
              "directory"};
}

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

size_t read_file_at(int fd, void* bytes, size_t size, uint64_t at, const std::string& path) {
  if (lseek(fd, static_cast<off_t>(at), SEEK_SET) < 0) fail("read " + path, errno);
  return read_file(fd, bytes, size, path);
}

std::vector<std::byte> whole_file(const std::string& path) {
  const Descriptor file = open_file(path, O_RDONLY);
  std::vector<std::byte> bytes(file_bytes(file.get(), path));
  bytes.resize(read_file(file.get(), bytes.data(), bytes.size(), path));
  return bytes;
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

void write_file_at(int fd, const void* bytes, size_t size, uint64_t at, const std::string& path) {
  if (lseek(fd, static_cast<off_t>(at), SEEK_SET) < 0) fail("write to " + path, errno);
  write_file(fd, bytes, size, path);
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

// The kernel grants a read lease only while no process has the file open or mapped for writing. On
// a file system without leases the function returns true, as it cannot know.
bool may_be_written(const std::string& path) {
  const Descriptor file = open_file(path, O_RDONLY);
  // When another process opens the file for writing, the kernel signals the holder of the lease.
  // The default signal, SIGIO, would kill this process; SIGURG is ignored.
  if (fcntl(file.get(), F_SETSIG, SIGURG) != 0) return true;
  return fcntl(file.get(), F_SETLEASE, F_RDLCK) != 0;
}

void sync_directory(const std::string& path) {
  const Descriptor directory = open_file(path, O_RDONLY | O_DIRECTORY);
  if (fsync(directory.get()) != 0) fail("write " + path + " to the disk", errno);
}

MappedRegion MappedRegion::in_memory(uint64_t bytes) { return {map(-1, bytes, "memory"), bytes}; }

MappedRegion MappedRegion::create(const std::string& path, uint64_t bytes) {
  const Descriptor file = open_file(path, O_RDWR | O_CREAT | O_TRUNC);
  reserve_file(file.get(), bytes, path);
  return {map(file.get(), bytes, path), bytes};
}

MappedRegion MappedRegion::open(const std::string& path) {
  const Descriptor file = open_file(path, O_RDWR);
  const uint64_t bytes = file_bytes(file.get(), path);
  if (bytes == 0) throw damaged(path, "it is empty");
  return {map(file.get(), bytes, path), bytes};
}

MappedRegion::~MappedRegion() {
  if (base_ != nullptr) munmap(base_, size_);
}

void persist(const void* at, uint64_t bytes) {
  static const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t first = reinterpret_cast<uintptr_t>(at) / page * page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(at) + bytes;
  if (msync(reinterpret_cast<void*>(first), last - first, MS_SYNC) == 0) return;
  const char* cause = std::strerror(errno);
  throw Error(ErrorKind::kUnavailable, std::string("the disk of the store failed: ") + cause);
}

// The kernel assigns the lowest free number, so reserved descriptors have the highest numbers.
void require_descriptor() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t most = limit.rlim_cur;
  const rlim_t kept = std::min(std::max<rlim_t>(kFewestClientDescriptors, most / 8), most / 2);
  const Descriptor next(eventfd(0, EFD_CLOEXEC));
  if (next && static_cast<rlim_t>(next.get()) < most - kept) return;
  throw Error(ErrorKind::kExhausted,
              "the box may open " + std::to_string(most) + " files, a segment each, and keeps " +
                  std::to_string(kept) +
                  " of them for new clients: free segments, or raise the limit on open "
                  "files (ulimit -n)");
}

}  // namespace hbm::box::server::storage
