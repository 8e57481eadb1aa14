#include "kernels/parallel.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/fork.h"
#include "base/thread_pool.h"
#include "kernels/copy.h"
#include "kernels/reduce.h"
#include "kernels/tuning.h"

namespace hbm::kernels {
namespace {

constexpr size_t kAlignment = 64;  // elements; no two parts share a cache line

// The helper threads of this process: as many as the largest call so far has asked for.
struct Helpers {
  ThreadPool pool{0};
};

// Divides `count` elements into parts of `part` elements, and runs task(first, elements) for each
// part on the calling thread or a helper.
template <typename Task>
void share_out(size_t count, size_t part, const Task& task) {
  if (part >= count) {
    task(size_t{0}, count);
    return;
  }
  const auto parts = static_cast<uint32_t>((count + part - 1) / part);
  ThreadPool& pool = per_process<Helpers>().pool;
  pool.grow(parts - 1);
  pool.run(parts, [&](uint32_t index) {
    const size_t first = index * part;
    task(first, std::min(part, count - first));
  });
}

}  // namespace

size_t Parallel::part_of(size_t count, size_t element) const noexcept {
  const size_t parts = std::clamp<size_t>(count * element / kBytesPerReduceThread, 1, threads_);
  if (parts == 1) return count;
  const size_t part = (count + parts - 1) / parts;
  return (part + kAlignment - 1) / kAlignment * kAlignment;
}

void Parallel::reduce_to(void* const* dsts, size_t m, const void* const* srcs, size_t n,
                         size_t count, Dtype dtype, ReduceOp op, size_t divisor) const {
  const size_t element = element_size(dtype);
  const size_t part = part_of(count, element);
  if (part == count) {
    kernels::reduce_to(dsts, m, srcs, n, count, dtype, op, divisor);
    return;
  }
  share_out(count, part, [&](size_t first, size_t elements) {
    std::vector<void*> to(dsts, dsts + m);
    std::vector<const void*> from(srcs, srcs + n);
    for (void*& dst : to) dst = static_cast<std::byte*>(dst) + first * element;
    for (const void*& src : from) src = static_cast<const std::byte*>(src) + first * element;
    kernels::reduce_to(to.data(), m, from.data(), n, elements, dtype, op, divisor);
  });
}

void Parallel::reduce(void* dst, const void* const* srcs, size_t n, size_t count, Dtype dtype,
                      ReduceOp op, size_t divisor) const {
  reduce_to(&dst, 1, srcs, n, count, dtype, op, divisor);
}

void Parallel::copy(void* dst, const void* src, size_t bytes, size_t whole) const {
  share_out(bytes, part_of(bytes, 1), [&](size_t first, size_t part) {
    copy_part(static_cast<std::byte*>(dst) + first, static_cast<const std::byte*>(src) + first,
              part, whole);
  });
}

}  // namespace hbm::kernels
