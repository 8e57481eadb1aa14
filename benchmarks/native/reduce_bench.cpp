// Measures csrc/kernels on this machine. It prints the GB/s of memory traffic (bytes read plus
// bytes stored) of one thread alone, and of two threads together, each on its own arrays.
//
// - both:  two sources that are also the destinations (a rank's half of an allreduce of two ranks)
// - bound: as both, by a plain loop over float32: the bound of the memory
// - slot:  each part of an array, in place, with the same 128 KiB of another (a staged allreduce)
// - apart: two sources, another destination
// - four:  four sources; the first is the destination
// - copy:  copy_bytes(), then memcpy for comparison
//
// The argument selects the rows whose names contain it.
#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace hbm {
namespace {

constexpr size_t kSizes[] = {32 << 10, 512 << 10, 32 << 20};  // bytes of an array
constexpr size_t kSlot = 128 << 10;
constexpr size_t kTraffic = 512 << 20;  // approximate bytes of a round
constexpr int kRounds = 15;

class Arrays {
 public:
  explicit Arrays(size_t bytes) {
    for (std::byte*& array : arrays_) {
      array = static_cast<std::byte*>(std::aligned_alloc(4096, bytes));
      std::memset(array, 0, bytes);
    }
  }
  ~Arrays() {
    for (std::byte* array : arrays_) std::free(array);
  }
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  void* operator[](size_t k) const { return arrays_[k]; }

 private:
  std::array<std::byte*, 4> arrays_;
};

std::string wanted;  // part of the selected rows' names

using Pass = std::function<void(const Arrays&, size_t bytes)>;

// Returns the median GB/s of all threads together. A pass moves `streams` times the bytes of an
// array.
double measure(size_t threads, size_t bytes, double streams, const Pass& pass) {
  const double moved = streams * static_cast<double>(bytes);
  const int passes = std::max(1, static_cast<int>(kTraffic / moved));
  std::barrier together(static_cast<std::ptrdiff_t>(threads));
  std::vector<double> seconds;
  const auto run = [&](bool keeps_time) {
    const Arrays arrays(bytes);
    pass(arrays, bytes);
    for (int round = 0; round < kRounds; ++round) {
      together.arrive_and_wait();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < passes; ++i) pass(arrays, bytes);
      together.arrive_and_wait();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      if (keeps_time) seconds.push_back(taken.count());
    }
  };
  {
    std::vector<std::jthread> others;
    for (size_t i = 1; i < threads; ++i) others.emplace_back(run, false);
    run(true);
  }
  std::nth_element(seconds.begin(), seconds.begin() + kRounds / 2, seconds.end());
  return static_cast<double>(threads) * passes * moved / seconds[kRounds / 2] / 1e9;
}

void report(const std::string& name, double streams, const Pass& pass) {
  if (name.find(wanted) == std::string::npos) return;
  std::printf("%-24s", name.c_str());
  for (size_t bytes : kSizes) {
    for (size_t threads : {1, 2}) std::printf(" %9.1f", measure(threads, bytes, streams, pass));
  }
  std::printf("\n");
  std::fflush(stdout);
}

void plain_loop(const Arrays& arrays, size_t bytes) {
  auto* a = static_cast<float*>(arrays[0]);
  auto* b = static_cast<float*>(arrays[1]);
#pragma GCC ivdep
  for (size_t i = 0; i < bytes / sizeof(float); ++i) a[i] = b[i] = a[i] + b[i];
}

void report_reductions(Dtype dtype, ReduceOp op) {
  const size_t width = element_size(dtype);
  const auto reduce_first = [=](const Arrays& arrays, size_t dst, size_t n, size_t bytes) {
    const std::array<const void*, 4> sources = {arrays[0], arrays[1], arrays[2], arrays[3]};
    kernels::reduce(arrays[dst], sources.data(), n, bytes / width, dtype, op, n);
  };
  const std::string name = std::string(dtype_name(dtype)) + " " + reduce_op_name(op) + " ";
  report(name + "both", 4, [=](const Arrays& arrays, size_t bytes) {
    void* const both[] = {arrays[0], arrays[1]};
    kernels::reduce_to(both, 2, both, 2, bytes / width, dtype, op, 2);
  });
  report(name + "slot", 3, [=](const Arrays& arrays, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kSlot) {
      void* const mine = static_cast<std::byte*>(arrays[0]) + at;
      const void* const sources[] = {mine, arrays[1]};
      kernels::reduce(mine, sources, 2, std::min(kSlot, bytes - at) / width, dtype, op, 2);
    }
  });
  report(name + "apart", 3,
         [=](const Arrays& arrays, size_t bytes) { reduce_first(arrays, 2, 2, bytes); });
  report(name + "four", 5,
         [=](const Arrays& arrays, size_t bytes) { reduce_first(arrays, 0, 4, bytes); });
}

void report_all() {
  std::printf("kernels: %s; GB/s of traffic, 1 and 2 threads\n%-24s", kernels::reduce_isa(),
              "array");
  for (size_t bytes : kSizes) std::printf(" %15zu KiB", bytes >> 10);
  std::printf("\n");
  report("copy", 2, [](const Arrays& a, size_t bytes) { kernels::copy_bytes(a[0], a[1], bytes); });
  report("memcpy", 2, [](const Arrays& a, size_t bytes) { std::memcpy(a[0], a[1], bytes); });
  report("float32 sum bound", 4, plain_loop);
  for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax}) {
      report_reductions(dtype, op);
    }
  }
}

}  // namespace
}  // namespace hbm

int main(int argc, char** argv) {
  if (argc > 1) hbm::wanted = argv[1];
  hbm::report_all();
  return 0;
}
