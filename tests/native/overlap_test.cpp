// Compares the overlaps that are found in strided arrays with an enumeration of all addresses.
#include "base/overlap.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace hbm {
namespace {

using Numbers = std::vector<int64_t>;

Numbers places_of(const Numbers& sizes, const Numbers& strides, int64_t first) {
  Numbers places = {first};
  for (size_t d = 0; d < sizes.size(); ++d) {
    Numbers next;
    for (const int64_t place : places) {
      for (int64_t i = 0; i < sizes[d]; ++i) next.push_back(place + i * strides[d]);
    }
    places = std::move(next);
  }
  return places;
}

bool by_enumeration(const Numbers& sizes, const Numbers& strides) {
  const Numbers places = places_of(sizes, strides, 0);
  return std::set<int64_t>(places.begin(), places.end()).size() < places.size();
}

std::string text(const Numbers& numbers) {
  std::string found;
  for (const int64_t number : numbers) found += std::to_string(number) + " ";
  return found;
}

// Calls `visit` for all sizes below `most_size` and strides below `most_stride` of an array with
// this number of dimensions.
template <class Visit>
void every_layout(size_t dimensions, int64_t most_size, int64_t most_stride, Visit visit) {
  Numbers sizes(dimensions), strides(dimensions);
  const auto choose = [&](auto& self, size_t d) -> void {
    if (d == dimensions) return visit(sizes, strides);
    for (sizes[d] = 0; sizes[d] < most_size; ++sizes[d]) {
      for (strides[d] = 0; strides[d] < most_stride; ++strides[d]) self(self, d + 1);
    }
  };
  choose(choose, 0);
}

TEST(Overlap, AgreesWithEnumerationForEverySmallLayout) {
  const auto compare = [](const Numbers& sizes, const Numbers& strides) {
    ASSERT_EQ(elements_overlap(sizes, strides), by_enumeration(sizes, strides))
        << "sizes " << text(sizes) << "strides " << text(strides);
  };
  every_layout(0, 0, 0, compare);
  every_layout(1, 5, 4, compare);
  every_layout(2, 6, 9, compare);
  every_layout(3, 4, 8, compare);
  every_layout(4, 3, 5, compare);
}

// Both arrays have elements of 2 bytes. The distance between the arrays is in bytes, so two
// elements may overlap by one byte.
TEST(Overlap, OfTwoArraysAgreesWithEnumeration) {
  std::vector<std::pair<Numbers, Numbers>> layouts;
  every_layout(2, 4, 6, [&](const Numbers& sizes, const Numbers& strides) {
    if (!by_enumeration(sizes, strides)) layouts.emplace_back(sizes, strides);
  });
  size_t number = 0;
  for (const auto& [sizes, strides] : layouts) {
    for (const auto& [other_sizes, other_strides] : layouts) {
      const bool same = sizes == other_sizes && strides == other_strides;
      if (!same && ++number % 7 != 0) continue;
      for (int64_t distance = 0; distance < 24; ++distance) {
        std::set<int64_t> bytes;
        for (const int64_t place : places_of(sizes, strides, 0)) {
          bytes.insert({2 * place, 2 * place + 1});
        }
        bool expected = false;
        for (const int64_t place : places_of(other_sizes, other_strides, 0)) {
          const int64_t first = distance + 2 * place;
          expected = expected || bytes.contains(first) || bytes.contains(first + 1);
        }
        const StridedArray a{100, 2, sizes, strides};
        const StridedArray b{100 + static_cast<uint64_t>(distance), 2, other_sizes, other_strides};
        ASSERT_EQ(arrays_overlap(a, b), expected) << distance;
        ASSERT_EQ(arrays_overlap(b, a), expected) << distance;
      }
    }
  }
}

TEST(Overlap, KnowsLargeLayouts) {
  constexpr int64_t kMany = int64_t{1} << 20;
  EXPECT_FALSE(elements_overlap(Numbers{kMany, kMany}, Numbers{1, kMany}));  // a transposed matrix
  EXPECT_TRUE(elements_overlap(Numbers{kMany, kMany}, Numbers{1, kMany - 1}));
  EXPECT_TRUE(elements_overlap(Numbers{kMany, 2}, Numbers{1, 1}));           // windows that overlap
  EXPECT_FALSE(elements_overlap(Numbers{999, 1000}, Numbers{1000, 999}));    // meet past the end
  EXPECT_TRUE(elements_overlap(Numbers{1000, 1001}, Numbers{1000, 999}));    // meet at 999 * 1000
  EXPECT_FALSE(elements_overlap(Numbers{2, 2}, Numbers{kMany, kMany + 1}));  // two rows, far apart
  EXPECT_FALSE(elements_overlap(Numbers{kMany, 2, 3}, Numbers{8, 3, 2}));
}

}  // namespace
}  // namespace hbm
