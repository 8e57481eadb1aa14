// The free memory that the kernel reports, and how often the tested functions read the reports.
#include "memory/room.h"

#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <thread>

#include "expect_error.h"
#include "memory/control_group.h"
#include "memory_fixture.h"

namespace hbm::memory {
namespace {

using std::chrono::milliseconds;

// Calls shared_room() while this process can open no file. Returns nothing if shared_room() needed
// a file.
std::optional<uint64_t> room_without_files(uint64_t bytes) {
  set_limit(RLIMIT_NOFILE, 0);
  std::optional<uint64_t> room;
  try {
    room = shared_room(bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
  }
  set_limit(RLIMIT_NOFILE, 64);
  return room;
}

TEST(Room, IsWithinTheControlGroups) { EXPECT_LE(machine_room(), group_limit().bytes); }

TEST(Room, SmallRequestsShareOneQuery) {
  // UBSan opens a pipe to inspect the first object of a class. Below, no descriptor is left for the
  // pipe, so an Error is made here.
  ASSERT_EQ(Error(ErrorKind::kUnavailable, "none").kind(), ErrorKind::kUnavailable);
  in_child([] {
    std::optional<uint64_t> again;
    while (!again) {  // on a busy machine the first reading may expire before the second call
      std::this_thread::sleep_for(milliseconds(110));
      const uint64_t first = shared_room(kMiB);
      again = room_without_files(kMiB);
      if (again) {
        EXPECT_EQ(*again, first - kMiB);
      }
    }
    EXPECT_FALSE(room_without_files(*again / 32)) << "a large request needs its own reading";
    std::this_thread::sleep_for(milliseconds(110));
    EXPECT_FALSE(room_without_files(kMiB)) << "the look is too old";
  });
}

}  // namespace
}  // namespace hbm::memory
