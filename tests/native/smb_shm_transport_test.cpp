// Segments that the shm transport maps, and the accesses that it prevents.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>

#include "box/protocol/socket.h"
#include "box/transport/transport.h"
#include "expect_error.h"
#include "smb_transport_fixture.h"

namespace hbm::box::transport {
namespace {

TEST(ShmTransport, MapsGrantedSegments) {
  Box box;
  OpenedTransport opened = open_shm(box.opening());
  const auto grant = alloc(*opened.transport, 1, 100000);
  ASSERT_NE(grant->memory, nullptr);
  EXPECT_EQ(grant->size, 100000u);
  std::byte* const there = box.handler.segment(1)->block->base();
  grant->memory[99999] = std::byte{7};
  EXPECT_EQ(there[99999], std::byte{7});
  there[0] = std::byte{8};
  EXPECT_EQ(grant->memory[0], std::byte{8});

  std::shared_ptr<void> holds = grant->holds;
  opened.transport.reset();
  EXPECT_EQ(grant->memory[0], std::byte{8});  // mapped as long as `holds` exists
}

TEST(ShmTransport, MapsReadOnlySegmentsForReading) {
  Box box;
  const OpenedTransport opened = open_shm(box.opening());
  const auto grant = alloc(*opened.transport, 1, 4096, protocol::Alloc::kReadOnly);
  ASSERT_NE(grant->memory, nullptr);
  box.handler.segment(1)->block->base()[5] = std::byte{9};
  EXPECT_EQ(grant->memory[5], std::byte{9});
  const Descriptor zeros(open("/dev/zero", O_RDONLY));
  EXPECT_EQ(read(zeros.get(), grant->memory, 1), -1);
  EXPECT_EQ(errno, EFAULT);
  EXPECT_NE(mprotect(grant->memory, 4096, PROT_READ | PROT_WRITE), 0) << "the descriptor lets it";
}

TEST(ShmTransport, KeepsSegmentsFromForkedChildren) {
  Box box;
  const OpenedTransport opened = open_shm(box.opening());
  const auto grant = alloc(*opened.transport, 1, 4096);
  EXPECT_DEATH(grant->memory[0] = std::byte{1}, "");
}

TEST(ShmTransport, RefusesAnotherUsersSocket) {
  constexpr uid_t kNobody = 65534;
  if (geteuid() != 0) GTEST_SKIP() << "root alone can listen as another user";
  const Scratch directory("/tmp");
  std::filesystem::permissions(directory / "", std::filesystem::perms::all);
  ASSERT_EQ(seteuid(kNobody), 0);
  const Descriptor listener = protocol::listen_at({"", 0, directory / "socket"});
  ASSERT_EQ(seteuid(0), 0);
  TransportOptions opening;
  opening.path = directory / "socket";
  expect_error(ErrorKind::kUnavailable, {opening.path, "user 65534", "own user (0)"},
               [&] { open_shm(opening); });
}

TEST(ShmTransport, ReportsWhyItCannotBeUsed) {
  const Box box;
  protocol::Joined joined = open_tcp(box.opening()).joined;
  EXPECT_EQ(why_no_shm(joined), "");
  joined.socket_path[0] = '\0';
  EXPECT_EQ(why_no_shm(joined), "the box has no Unix socket");
  std::strcpy(joined.socket_path, "/nowhere/socket");
  EXPECT_NE(why_no_shm(joined).find("/nowhere/socket"), std::string::npos);
  joined.boot_id[0] = 'x';
  EXPECT_EQ(why_no_shm(joined), "the box runs on another machine");
}

}  // namespace
}  // namespace hbm::box::transport
