// Reductions and copies on several threads give the result of one thread.
#include "kernels/parallel.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "kernels/copy.h"
#include "kernels/reduce.h"
#include "kernels/tuning.h"
#include "seeds.h"

namespace hbm::kernels {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(size_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes made(bytes);
  for (size_t at = 0; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
    const uint64_t value = random();
    std::memcpy(made.data() + at, &value, sizeof value);
  }
  return made;
}

void expect_the_same_sum(size_t threads, size_t count, Dtype dtype) {
  SCOPED_TRACE(std::to_string(threads) + " threads, " + std::to_string(count) + " " +
               dtype_name(dtype));
  const size_t bytes = count * element_size(dtype);
  const uint64_t seed = test_seed();
  const std::vector<Bytes> sources = {random_bytes(bytes, seed), random_bytes(bytes, seed + 1),
                                      random_bytes(bytes, seed + 2)};
  const std::vector<const void*> from = {sources[0].data(), sources[1].data(), sources[2].data()};
  Bytes expected(bytes);
  reduce(expected.data(), from.data(), from.size(), count, dtype, ReduceOp::kSum, 1);

  const Parallel parallel(threads);
  Bytes found(bytes), also(bytes), single(bytes);
  const std::vector<void*> to = {found.data(), also.data()};
  parallel.reduce_to(to.data(), to.size(), from.data(), from.size(), count, dtype, ReduceOp::kSum,
                     1);
  parallel.reduce(single.data(), from.data(), from.size(), count, dtype, ReduceOp::kSum, 1);
  EXPECT_TRUE(found == expected);
  EXPECT_TRUE(also == expected);
  EXPECT_TRUE(single == expected);
}

constexpr size_t kUnit = kBytesPerReduceThread;

TEST(Parallel, SumsHaveTheSameBits) {
  for (const size_t threads : {1, 2, 3, 4}) {
    for (const size_t count : {size_t{0}, size_t{1}, kUnit / 4 + 1, kUnit + 13}) {
      expect_the_same_sum(threads, count, Dtype::kFloat32);
      expect_the_same_sum(threads, count, Dtype::kBFloat16);
    }
  }
}

TEST(Parallel, CopiesAreWhole) {
  for (const size_t bytes : {size_t{1}, 2 * kUnit + 1, kNonTemporalFromAtMostBytes + 77}) {
    const Bytes from = random_bytes(bytes + 1, test_seed());
    Bytes to(bytes + 2, std::byte{0x5a});
    Parallel(3).copy(to.data() + 1, from.data() + 1, bytes, bytes);
    EXPECT_EQ(std::memcmp(to.data() + 1, from.data() + 1, bytes), 0) << bytes;
    EXPECT_EQ(to.front(), std::byte{0x5a});
    EXPECT_EQ(to.back(), std::byte{0x5a});
  }
}

TEST(Parallel, ConcurrentCallersDoNotMixTheirWork) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([caller] {
      for (int round = 0; round < 5; ++round) {
        expect_the_same_sum(4, kUnit + static_cast<size_t>(caller), Dtype::kInt32);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(Parallel, AForkedChildHasItsOwnThreads) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer lets no forked child start a thread";
#endif
  expect_the_same_sum(3, kUnit, Dtype::kFloat64);
  const pid_t child = fork();
  if (child == 0) {
    expect_the_same_sum(3, kUnit, Dtype::kFloat64);
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace hbm::kernels
