// The conformance tests of accumulate and fetch_add (smb_conformance_fixture.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "seeds.h"
#include "smb_conformance_fixture.h"

namespace hbm::box::client {
namespace {

// Compares accumulate with a loop in C++ arithmetic of T, which gives the same results as NumPy.
// accumulate_test tests the types that C++ lacks.
template <class T>
void accumulates(Client& client, Dtype dtype) {
  std::mt19937_64 random = test_random();
  constexpr size_t kCount = 2 * kChunk / sizeof(T) + 3;
  const Segment target = client.alloc({.size = kCount * sizeof(T)});
  const Segment source = client.alloc({.size = kCount * sizeof(T)});
  std::vector<T> expected(kCount), added(kCount);
  for (T& value : expected) value = static_cast<T>(static_cast<int64_t>(random() % 2001) - 1000);
  for (T& value : added) value = static_cast<T>(static_cast<int64_t>(random() % 2001) - 1000);
  client.write(target, 0, bytes_of(expected), kCount * sizeof(T));
  client.write(source, 0, bytes_of(added), kCount * sizeof(T));

  const size_t counts[] = {0, 1, 997, kCount - 5};
  for (const size_t count : counts) {
    const size_t at = random() % (kCount - count + 1);
    const size_t from = random() % (kCount - count + 1);
    const double scale = 3;
    client.accumulate(target, source,
                      {.dtype = dtype,
                       .scale = scale,
                       .bytes = count * sizeof(T),
                       .target_offset = at * sizeof(T),
                       .source_offset = from * sizeof(T)});
    for (size_t i = 0; i < count; ++i) {
      const T product = static_cast<T>(static_cast<T>(scale) * added[from + i]);
      expected[at + i] = static_cast<T>(expected[at + i] + product);
    }
  }
  std::vector<T> found(kCount);
  client.read(target, 0, bytes_of(found), kCount * sizeof(T));
  EXPECT_EQ(found, expected) << dtype_name(dtype);
}

TEST_P(SmbConformance, AccumulateAddsScaledRanges) {
  const auto client = connect();
  accumulates<float>(*client, Dtype::kFloat32);
  accumulates<double>(*client, Dtype::kFloat64);
  accumulates<int32_t>(*client, Dtype::kInt32);
  accumulates<int64_t>(*client, Dtype::kInt64);
}

TEST_P(SmbConformance, AccumulateConverts) {
  const auto client = connect();
  constexpr size_t kCount = kChunk / sizeof(float) + 3;
  const Segment wide = client->alloc({.size = kCount * sizeof(double)});
  const Segment narrow = client->alloc({.size = kCount * sizeof(float)});
  std::vector<double> doubles(kCount, 0.5);
  std::vector<float> floats(kCount);
  std::iota(floats.begin(), floats.end(), 0.0f);
  client->write(wide, 0, bytes_of(doubles), kCount * sizeof(double));
  client->write(narrow, 0, bytes_of(floats), kCount * sizeof(float));
  // Adds three times the elements of `narrow`, from index 1 on, to the elements of `wide`, from
  // index 3 on. Then assigns twice each element of `wide` to `narrow`.
  client->accumulate(wide, narrow,
                     {.dtype = Dtype::kFloat64,
                      .source_dtype = Dtype::kFloat32,
                      .scale = 3,
                      .bytes = (kCount - 3) * sizeof(double),
                      .target_offset = 3 * sizeof(double),
                      .source_offset = sizeof(float)});
  client->accumulate(narrow, wide,
                     {.dtype = Dtype::kFloat32,
                      .source_dtype = Dtype::kFloat64,
                      .combine = Combine::kAssign,
                      .scale = 2,
                      .bytes = kCount * sizeof(float)});
  client->read(wide, 0, bytes_of(doubles), kCount * sizeof(double));
  client->read(narrow, 0, bytes_of(floats), kCount * sizeof(float));
  for (size_t i = 0; i < kCount; ++i) {
    const double expected = i < 3 ? 0.5 : 0.5 + 3 * static_cast<double>(i - 2);
    ASSERT_EQ(doubles[i], expected) << i;
    ASSERT_EQ(floats[i], static_cast<float>(2 * expected)) << i;
  }
}

TEST_P(SmbConformance, AccumulateRefusesInvalidCombinations) {
  const auto client = connect();
  const Segment segment = client->alloc({.size = 4096});
  const auto refused = [&](const Accumulation& what) {
    EXPECT_THROW(client->accumulate(segment, segment, what), Error);
  };
  refused({.dtype = Dtype::kComplex64, .bytes = 64});
  refused({.dtype = Dtype::kFloat32, .bytes = 6});
  refused({.dtype = Dtype::kFloat32, .bytes = 8, .target_offset = 2});
  refused({.dtype = Dtype::kFloat32, .bytes = 8192});
  refused({.dtype = Dtype::kFloat32, .bytes = 64, .target_offset = 32});  // overlaps its source
  refused({.dtype = Dtype::kFloat32, .source_dtype = Dtype::kInt32, .bytes = 64});
  refused({.dtype = Dtype::kFloat16, .source_dtype = Dtype::kBFloat16, .bytes = 64});
  // With these two types the source is twice as long as the target. Then the two may not overlap
  // even if both begin at the same offset.
  const Dtype narrow = Dtype::kFloat32, wide = Dtype::kFloat64;
  refused({.dtype = narrow, .source_dtype = wide, .bytes = 64, .source_offset = 4096 - 64});
  refused({.dtype = narrow, .source_dtype = wide, .bytes = 64, .source_offset = 68});
  refused({.dtype = narrow, .source_dtype = wide, .bytes = 64});
  refused({.dtype = narrow, .source_dtype = wide, .bytes = 64, .target_offset = 124});
  EXPECT_THROW(client->fetch_add(segment, 4, 1), Error);
  EXPECT_THROW(client->fetch_add(segment, 4096, 1), Error);
  client->accumulate(segment, segment, {.dtype = Dtype::kFloat32, .bytes = 4096});  // onto itself
}

TEST_P(SmbConformance, NoUpdateIsLost) {
  constexpr int kClients = 4, kRounds = 25;
  constexpr uint64_t kBytes = 2 * kChunk + 64;
  const auto owner = connect();
  const Segment total = owner->alloc({.size = kBytes});
  std::vector<std::thread> threads;
  for (int each = 0; each < kClients; ++each) {
    threads.emplace_back([&, each] {
      const auto client = connect();
      const Segment target =
          client->alloc({.size = kBytes, .key = total.key(), .mode = protocol::AllocMode::kAttach});
      const Segment source = client->alloc({.size = kBytes, .temporary = true});
      std::vector<int64_t> ones(kBytes / 8, 1);
      client->write(source, 0, bytes_of(ones), kBytes);
      for (int round = 0; round < kRounds; ++round) {
        // The clients' ranges are shifted against each other, so that they overlap in part.
        const uint64_t offset = 8 * static_cast<uint64_t>(each);
        client->accumulate(target, source,
                           {.dtype = Dtype::kInt64, .bytes = kBytes - 64, .target_offset = offset});
        client->fetch_add(target, 512, 1);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::vector<int64_t> sums(kBytes / 8);
  owner->read(total, 0, bytes_of(sums), kBytes);
  EXPECT_EQ(sums[0], kRounds);  // only the first client's range has this element
  EXPECT_EQ(sums[64], 2 * kClients * kRounds);
  EXPECT_EQ(std::count(sums.begin() + 8, sums.end() - 12, kClients * kRounds),
            static_cast<ptrdiff_t>(sums.size()) - 8 - 12 - 1);
}

TEST_P(SmbConformance, FetchAddCountsEveryCall) {
  constexpr int kClients = 4, kCalls = 200;
  const auto owner = connect();
  const Segment cells = owner->alloc({.size = 16});
  std::vector<std::vector<int64_t>> seen(kClients);
  std::vector<std::thread> threads;
  for (auto& mine : seen) {
    threads.emplace_back([&] {
      const auto client = connect();
      const Segment shared =
          client->alloc({.size = 16, .key = cells.key(), .mode = protocol::AllocMode::kAttach});
      for (int i = 0; i < kCalls; ++i) mine.push_back(client->fetch_add(shared, 8, 1));
    });
  }
  for (auto& thread : threads) thread.join();
  std::vector<int64_t> all;
  for (const auto& mine : seen) {
    EXPECT_TRUE(std::ranges::is_sorted(mine));
    all.insert(all.end(), mine.begin(), mine.end());
  }
  std::ranges::sort(all);
  std::vector<int64_t> expected(kClients * kCalls);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(all, expected);
}

INSTANTIATE_TEST_SUITE_P(Transports, SmbConformance, testing::ValuesIn(transports()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace hbm::box::client
