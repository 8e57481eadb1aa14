// The division of a transfer into slices.
#include "box/transport/slices.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace hbm::box::transport {
namespace {

TEST(Slices, CutNoElementInTwo) {
  constexpr uint64_t kMost = 4 * kSliceBytes;
  std::array<std::byte, 1> memory{};  // only its address is used
  const Grant grant;
  for (const uint64_t begin : {0, 1, 4, 5, 7, 8, 4093}) {
    for (const uint64_t bytes :
         {uint64_t{0}, uint64_t{3}, uint64_t{kSliceBytes}, kMost, kMost + 3}) {
      TransportRequest request;
      request.opcode = protocol::Opcode::kRead;
      request.grant = &grant;
      request.offset = begin;
      request.local = memory.data();
      request.bytes = bytes;
      Slices slices;
      slices.put(request);
      uint64_t moved = 0;
      int count = 0;
      while (const auto slice = slices.take()) {
        ASSERT_EQ(slice->transfer.offset, begin + moved);
        ASSERT_EQ(slice->local, memory.data() + moved);
        ASSERT_LE(slice->transfer.bytes, kSliceBytes);
        EXPECT_TRUE(count == 0 || slice->transfer.offset % 8 == 0) << bytes << " at " << begin;
        ++count;
        moved += slice->transfer.bytes;
        slices.finish(*slice, protocol::Status::kOk, "");
      }
      EXPECT_TRUE(request.finished());
      EXPECT_EQ(moved, bytes);
      EXPECT_LE(count, static_cast<int>((bytes + 7) / kSliceBytes) + 1);
    }
  }
}

}  // namespace
}  // namespace hbm::box::transport
