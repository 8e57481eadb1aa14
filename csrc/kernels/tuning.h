// Thresholds of copies, sums, and low-rank products.
// Measure: `python -m benchmarks.collectives --collectives allreduce`

#pragma once

#include <cstddef>
#include <cstdint>

namespace hbm::kernels {

// -- Copies

// The size from which every copy uses non-temporal stores on x86-64, however large the last-level
// cache is. It also applies if the kernel does not report the cache's size. With 32 MiB of cache,
// copies with these stores are faster from 8 MiB on, and 1.2 times as fast at 16 MiB. But after a
// copy of less than half of the cache, the reader would lose more time than that, because it would
// have to read from memory.
// Unit: bytes
// Below: stores are cached, unless kNonTemporalCacheDivisor decides otherwise.
// Above: from the value on, stores are non-temporal. The destination would not stay in the cache
// until it is read, and its old contents need not be fetched.
inline constexpr size_t kNonTemporalFromAtMostBytes = size_t{16} << 20;

// The divisor of the last-level cache's size; the quotient is the size from which copies use
// non-temporal stores. With 16 MiB of cache, a copy of 8 MiB takes 0.6 times as long with these
// stores as with cached ones. A copy of 4 MiB takes 1.4 times as long.
// Unit: parts of the last-level cache
// Below: a smaller value caches larger copies, which leave the cache before they are read.
// Above: a larger value sends readers to memory for data that the cache could hold.
inline constexpr size_t kNonTemporalCacheDivisor = 2;

// The bytes of one memcpy. On x86-64, glibc copies up to about the size of the second-level cache
// by `rep movsb`, which need not fetch the cache lines that it overwrites. The loops that glibc
// uses for larger copies fetch these lines. With 1 MiB of second-level cache, copies of 2 to 16 MiB
// in parts of 32 to 512 KiB took 0.7 to 0.85 times as long as one memcpy.
// Unit: bytes
// Below: up to and including the value, a copy is one memcpy.
// Above: a copy is several calls of memcpy, of at most this size each.
inline constexpr size_t kMemcpyPartBytes = size_t{128} << 10;

// The distance at which a copy prefetches the source ahead of its non-temporal stores. Copies of 16
// to 64 MiB took 0.75 to 0.9 of the time without prefetching.
// Unit: bytes
// Below: a smaller value waits for memory.
// Above: a larger value, such as a whole page, is slower while two ranks copy.
inline constexpr size_t kPrefetchAheadBytes = 1024;

// -- Copies to a peer, which share a choice between cached and non-temporal stores

// The least copy to a peer that may be non-temporal.
// Unit: bytes
// Below: the copy uses cached stores, because non-temporal stores need a fence, which takes time.
// Above: from the value on, the copy uses the kind of store that the trials show to be faster.
// Measure: `python -m benchmarks.collectives --collectives sendrecv --contenders hbm-c-staged`
inline constexpr size_t kNonTemporalPeerCopyBytes = 4096;

// The least copy to a peer that is timed.
// Unit: bytes
// Below: copies are not timed, because reading the clock would take a large part of the time.
// Above: from the value on, some copies are timed. The range ends at the size from which all copies
// are non-temporal.
inline constexpr size_t kTimedPeerCopyBytes = 16 << 10;

// The number of copies of a timed size in which one trial is made. A trial is a pair of timed
// copies.
// Unit: copies
// Below: a smaller value makes more copies with the slower kind of store.
// Above: a larger value notices later that the scheduler has moved a rank.
inline constexpr uint32_t kPeerCopiesPerTrial = 32;

// The number of copies of a timed size that are timed without a pause, so that the choice is made
// early.
// Unit: copies
// Below: copies are timed, in pairs.
// Above: from the value on, one pair in each kPeerCopiesPerTrial copies is timed.
inline constexpr uint32_t kFirstTrialPeerCopies = 4;

// The number of trials that must agree to reverse a choice that earlier trials have confirmed. One
// trial is not enough, because the thread may have been preempted during it.
// Unit: trials
// Below: the choice stays.
// Above: from the value on, copies use the other kind of store.
// Measure: `copy_test --gtest_filter=Copy.PrefersAKindOnceTwoPairsAgree`
inline constexpr int kAgreeingTrials = 2;

// The time of the cached copy, relative to the non-temporal copy of its trial, above which the
// trial counts for non-temporal stores. Only writing is timed. A peer reads sooner from a cache
// that it shares, so non-temporal stores have to be twice as fast.
// Unit: percent
// Below: up to and including the value, the trial does not count for non-temporal stores.
// Above: the trial counts for them.
// Measure: `copy_test --gtest_filter=Copy.PrefersAKindOnceTwoPairsAgree`
inline constexpr int kNonTemporalAbovePercent = 200;

// The time of the cached copy, relative to the non-temporal copy of its trial, below which the
// trial counts for cached stores. From this value up to kNonTemporalAbovePercent, it counts for
// neither kind.
// Unit: percent
// Below: the trial counts for cached stores.
// Above: from the value on, the trial does not count for them.
// Measure: `copy_test --gtest_filter=Copy.PrefersAKindOnceTwoPairsAgree`
inline constexpr int kCachedBelowPercent = 150;

// kNonTemporalAbovePercent of copies below kTimedPeerCopyBytes. Non-temporal stores have to be
// faster by more, because the fence after them takes a large part of a short copy's time. On
// near processors a cached copy of 16 KiB took 3 times as long as the other. A broadcast of 4 KiB
// then took 0.85 us with non-temporal stores instead of 0.55 us. On distant ones the copy took 11
// times as long, and a sendrecv of 8 KiB took 4.6 us instead of 9.1 us.
// Unit: percent
// Below: up to and including the value, the trial does not count for non-temporal stores.
// Above: the trial counts for them.
// Measure: `copy_test --gtest_filter=Copy.ShortCopiesNeedALargerDifference`
inline constexpr int kShortNonTemporalAbovePercent = 600;

// kCachedBelowPercent of copies below kTimedPeerCopyBytes.
// Unit: percent
// Below: the trial counts for cached stores.
// Above: from the value on, the trial does not count for them.
// Measure: `copy_test --gtest_filter=Copy.ShortCopiesNeedALargerDifference`
inline constexpr int kShortCachedBelowPercent = 450;

// -- Sums

// The bytes of a result for which a reduction or copy takes one thread. It takes at most
// reduce_threads threads. One thread needs half a millisecond for these bytes; waking another
// thread takes 50 us.
// Unit: bytes
// Below: under twice the value, one thread does all.
// Above: each further multiple of the value takes a further thread.
// Measure: `HBMCOMM_REDUCE_THREADS=2 python -m benchmarks.collectives --collectives allreduce`
inline constexpr size_t kBytesPerReduceThread = size_t{1} << 20;

// The bytes of partial sums that are averaged in one step. They are on the stack, and stay in the
// innermost cache.
// Unit: bytes
// Below: a smaller value calls the kernel more often.
// Above: a larger value leaves the innermost cache.
// Measure: `partial_sum_test --gtest_filter=PartialSum.AverageMayReplaceASource`
inline constexpr size_t kAverageStepBytes = 4096;

// The number of integers that are multiplied by a factor in one step before they are added. The
// products of one step stay in the innermost cache.
// Unit: elements
// Below: a smaller value calls the kernel more often.
// Above: a larger value leaves the innermost cache.
// Measure: `python -m benchmarks.box --sections accumulate`
inline constexpr size_t kScaledIntegersPerStep = 1024;

// -- Products of a matrix with tall and skinny factors

// The rows of the smallest part when threads divide the rows of a product among them. The value is
// a multiple of the rows of every tile of registers.
// Unit: rows
// Below: a smaller value leaves registers unused at the end of each part.
// Above: a larger value shares a matrix less evenly among threads.
// Measure: `python -m papers.layer_drop --sections pass`
inline constexpr size_t kTallSkinnyPartRows = 24;

// The columns of the smallest part when threads divide the columns of a product among them.
// Unit: columns
// Below: a smaller value leaves registers unused at the end of each part.
// Above: a larger value shares a matrix less evenly among threads.
// Measure: `python -m papers.layer_drop --sections pass`
inline constexpr size_t kTallSkinnyPartColumns = 256;

// The rows of the matrix that find_right() packs at a time. They stay in the cache while they are
// multiplied by all columns of the left factor.
// Unit: rows
// Below: a smaller value reads the sums of the product more often.
// Above: a larger value leaves the cache.
// Measure: `python -m papers.layer_drop --sections pass`
inline constexpr size_t kTallSkinnyRowsInCache = 64;

// The columns of the matrix that find_left() handles at a time. The elements of a tile's rows in
// these columns stay in the cache while they are multiplied by all columns of the right factor.
// Unit: columns
// Below: a smaller value reads the sums of the product more often.
// Above: a larger value leaves the cache.
// Measure: `python -m papers.layer_drop --sections pass`
inline constexpr size_t kTallSkinnyColumnsInCache = 1024;

// The number of reflections that are applied together when columns are made orthonormal.
// Unit: reflections
// Below: a smaller value reads the columns more often.
// Above: a larger value computes more products of reflections with each other.
// Measure: `python -m papers.layer_drop --sections pass`
inline constexpr size_t kReflectionsPerStep = 8;

}  // namespace hbm::kernels
