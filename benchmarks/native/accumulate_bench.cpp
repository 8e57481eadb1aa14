// Measures the box's accumulate on this machine, with 1 and 2 threads. It prints the GB/s of memory
// traffic (reads and one store per element), and the percentage of the bound. The bound is a triad
// of float32, a[i] = b[i] + s * c[i], with non-temporal stores. Accumulate and the bound are
// measured alternately. The rows are:
//
// - memory:  float32 in segments in memory, in chunks of several sizes
// - store:   float32 in segments in a store. The writes of undo records do not count as traffic.
// - others:  other types and formulas that a parameter server uses, in memory
//
// First argument: the directory of the store, which the program removes at the end (default: one in
// the temporary directory). Second argument: the size in MiB of each array of the triad, and of the
// larger of target and source (default: 128).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "box/server/accumulator.h"
#include "box/server/storage/store.h"
#include "triad.h"

namespace hbm::box::server {
namespace {

constexpr int kRounds = 11;
constexpr uint32_t kChunks[] = {16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10};

constexpr kernels::Formula kFloat32{
    .target = Dtype::kFloat32, .source = Dtype::kFloat32, .scale = 0.5};
constexpr kernels::Formula kFormulas[] = {
    {Dtype::kFloat32, Dtype::kFloat32, Combine::kAssign, 0.5},
    {Dtype::kFloat32, Dtype::kBFloat16, Combine::kAdd, 0.5},
    {Dtype::kBFloat16, Dtype::kFloat32, Combine::kAssign, 1},
    {Dtype::kFloat64, Dtype::kFloat32, Combine::kAdd, 0.5},
    {Dtype::kFloat32, Dtype::kFloat64, Combine::kAssign, 1},
};

using Pass = std::function<void()>;

// A function, and the bytes that it moves through memory.
struct Load {
  uint64_t bytes;
  Pass run;
};

struct Rates {
  double bound, measured;  // GB/s
};

// Runs the two loads alternately, and returns their median rates.
Rates rates(const Load& bound, const Load& measured) {
  const auto time = [](const Pass& pass) {
    const auto start = std::chrono::steady_clock::now();
    pass();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto median_rate = [](uint64_t bytes, std::vector<double> seconds) {
    std::nth_element(seconds.begin(), seconds.begin() + kRounds / 2, seconds.end());
    return static_cast<double>(bytes) / seconds[kRounds / 2] / 1e9;
  };
  bound.run();
  measured.run();
  std::vector<double> of_bound, of_measured;
  for (int round = 0; round < kRounds; ++round) {
    of_bound.push_back(time(bound.run));
    of_measured.push_back(time(measured.run));
  }
  return {median_rate(bound.bytes, of_bound), median_rate(measured.bytes, of_measured)};
}

float* floats(const storage::BoxSegment& segment) {
  return reinterpret_cast<float*>(segment.block->base());
}

// The bound: a triad on three segments of a store.
class StoredTriad {
 public:
  StoredTriad(storage::Store& store, uint64_t bytes, unsigned threads) {
    for (uint64_t key : {1, 2, 3}) {
      arrays_.push_back(store.create({.key = {1, key}, .size = bytes, .creator = {}}));
    }
    for (auto& array : arrays_) std::fill_n(floats(*array), bytes / sizeof(float), 1.0f);
    const auto at = [&](size_t k) { return std::span(arrays_[k]->block->base(), bytes); };
    triad_ = std::make_unique<bench::Triad>(at(0), at(1), at(2), threads);
  }

  void run() { triad_->run(); }

 private:
  std::vector<std::shared_ptr<storage::BoxSegment>> arrays_;
  std::unique_ptr<bench::Triad> triad_;
};

std::unique_ptr<storage::Store> open(const std::string& directory, uint64_t bytes, uint32_t chunk) {
  memory::PoolOptions pool;
  pool.capacity = 4 * bytes + (uint64_t{1} << 20);
  return storage::Store::open({.directory = directory, .records = {.chunk = chunk}},
                              memory::Pool::create(pool));
}

Rates measure(const std::string& directory, uint64_t bytes, uint32_t chunk, unsigned threads,
              const kernels::Formula& formula) {
  const std::unique_ptr<storage::Store> memory = open("", bytes, chunk);
  StoredTriad bound(*memory, bytes, threads);
  const std::unique_ptr<storage::Store> store = open(directory, bytes, chunk);
  const auto target = store->create({.key = {1, 1}, .size = bytes, .creator = {}});
  const auto source = store->create({.key = {1, 2}, .size = bytes, .creator = {}});
  for (storage::BoxSegment* one : {target.get(), source.get()}) {
    std::fill_n(floats(*one), bytes / sizeof(float), 1.0f);
  }
  const size_t width = element_size(formula.target), source_width = element_size(formula.source);
  const uint64_t count = bytes / std::max(width, source_width);
  const uint64_t traffic =
      count * (source_width + width * (formula.combine == Combine::kAdd ? 2 : 1));
  storage::SessionRecord& session = store->records().open_session({0, 1});
  Accumulator accumulator(store->records(), threads);
  uint64_t number = 0;
  const Rates found = rates({3 * bytes, [&] { bound.run(); }},
                            {traffic, [&] {
                               accumulator.accumulate(session, ++number, {*target, 0}, {*source, 0},
                                                      count * width, formula);
                             }});
  if (store->durable()) std::filesystem::remove_all(directory);
  return found;
}

void report_line(const std::string& what, const std::function<Rates(unsigned threads)>& measure) {
  std::printf("%-24s", what.c_str());
  for (unsigned threads : {1, 2}) {
    const Rates found = measure(threads);
    std::printf(" %8.1f GB/s %4.0f %%", found.measured, 100 * found.measured / found.bound);
  }
  std::printf("\n");
  std::fflush(stdout);
}

void report(const std::string& directory, uint64_t bytes) {
  std::printf("%-24s %20s %20s\n", "", "1 thread", "2 threads");
  for (const std::string& where : {std::string(), directory}) {
    for (uint32_t chunk : kChunks) {
      report_line(
          (where.empty() ? "memory, " : "store, ") + std::to_string(chunk >> 10) + " KiB",
          [&](unsigned threads) { return measure(where, bytes, chunk, threads, kFloat32); });
    }
  }
  for (const kernels::Formula& formula : kFormulas) {
    const char* const sign = formula.combine == Combine::kAdd ? " += " : " = ";
    report_line(std::string(dtype_name(formula.target)) + sign + dtype_name(formula.source),
                [&](unsigned threads) {
                  return measure("", bytes, storage::RecordSizes().chunk, threads, formula);
                });
  }
}

}  // namespace
}  // namespace hbm::box::server

int main(int argc, char** argv) {
  const auto temporary = std::filesystem::temp_directory_path() / "hbm_accumulate_bench";
  const uint64_t mebibytes = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 128;
  hbm::box::server::report(argc > 1 ? argv[1] : temporary.string(), mebibytes << 20);
  return 0;
}
