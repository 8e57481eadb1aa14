// A store on a disk that is full.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>

#include "expect_error.h"
#include "smb_store_copies.h"

namespace {

std::atomic<bool> disk_full{false};

bool refuses(int fd, off_t end) {
  struct stat status{};
  if (!disk_full || fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return false;
  if (end <= status.st_size) return false;
  errno = ENOSPC;
  return true;
}

}  // namespace

// Replaces libc's function, so that files cannot grow while disk_full is true.
extern "C" int fallocate(int fd, int mode, off_t offset, off_t length) {
  if (refuses(fd, offset + length)) return -1;
  return static_cast<int>(syscall(SYS_fallocate, fd, mode, offset, length));
}

extern "C" ssize_t write(int fd, const void* bytes, size_t size) {
  const bool appends = (fcntl(fd, F_GETFL) & O_APPEND) != 0;
  const off_t at = disk_full ? lseek(fd, 0, appends ? SEEK_END : SEEK_CUR) : 0;
  if (at >= 0 && refuses(fd, at + static_cast<off_t>(size))) return -1;
  return syscall(SYS_write, fd, bytes, size);
}

namespace hbm::box::server::storage {
namespace {

class FullDisk : public testing::Test {
 protected:
  ~FullDisk() override { disk_full = false; }
  const Scratch scratch;
};

TEST_F(FullDisk, KilledBoxRestarts) {
  const FilledStore filled(scratch.store());
  filled.copy_to(scratch / "copy");
  disk_full = true;
  const auto store = open_store(scratch / "copy", kFewRecords);
  filled.expect_in(*store);
  expect_error(ErrorKind::kExhausted, {"No space"}, [&] { store->create(creation(9, 5000)); });
  disk_full = false;
  store->create(creation(9, 5000));
}

// A box with room for more sessions and operations needs more disk space for its records. On a full
// disk it keeps the sizes of the previous box's records.
TEST_F(FullDisk, BoxKeepsExistingRecordSizes) {
  const FilledStore filled(scratch.store());
  filled.copy_to(scratch / "copy");
  disk_full = true;
  const auto store =
      open_store(scratch / "copy", {.sessions = 9, .operations = 7, .parts = 2, .chunk = 8192});
  EXPECT_EQ(store->records().sizes(), kFewRecords);
  filled.expect_in(*store);
  EXPECT_FALSE(std::filesystem::exists(scratch / "copy/sessions.new"));
}

TEST_F(FullDisk, OrderlyEndEqualsAKill) {
  FilledStore filled(scratch.store());
  filled.segments.clear();
  disk_full = true;
  testing::internal::CaptureStderr();
  filled.store->close();
  EXPECT_NE(testing::internal::GetCapturedStderr().find("without checksums"), std::string::npos);
  filled.store.reset();
  filled.expect_in(*open_store(scratch.store(), kFewRecords));
}

}  // namespace
}  // namespace hbm::box::server::storage
