// The program "bounds": the shortest times that memory alone allows.
//
//   triad BYTES THREADS   prepares the bound of accumulate (triad.h), with arrays of BYTES
//   bound BYTES RANKS     prepares the bound of an allreduce of BYTES by RANKS
//   run SAMPLES CALLS     times the bound prepared last
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "program.h"
#include "triad.h"

namespace hbm::bench {
namespace {

// These two functions cause the least memory traffic of one rank in an allreduce. They read the
// rank's share of every rank's buffer, and write the sum to all these shares. The shares are
// adjacent in memory. No rank waits for another. The loops are plain, and the compiler vectorises
// them for its default target, so the bound does not depend on hbm's kernels.
void reduce_two_shares(float* __restrict first, float* __restrict second, size_t share) {
  for (size_t i = 0; i < share; ++i) first[i] = second[i] = first[i] + second[i];
}

void reduce_shares(float* data, size_t share, size_t ranks) {
  std::array<float, 1024> sum;  // fits into the first-level cache
  for (size_t begin = 0; begin < share; begin += sum.size()) {
    const size_t count = std::min(sum.size(), share - begin);
    std::copy_n(data + begin, count, sum.begin());
    for (size_t rank = 1; rank < ranks; ++rank) {
      const float* source = data + rank * share + begin;
      for (size_t i = 0; i < count; ++i) sum[i] += source[i];
    }
    for (size_t rank = 0; rank < ranks; ++rank) {
      std::copy_n(sum.begin(), count, data + rank * share + begin);
    }
  }
}

class Bounds {
 public:
  void triad(size_t bytes, size_t threads) {
    triad_.reset();  // uses pages_
    pages_.clear();
    for (int array = 0; array < 3; ++array) pages_.push_back(std::make_unique<Pages>(bytes));
    triad_ = std::make_unique<Triad>(pages_[0]->bytes(), pages_[1]->bytes(), pages_[2]->bytes(),
                                     threads);
    run_ = [this] { triad_->run(); };
  }

  void bound(size_t bytes, size_t ranks) {
    triad_.reset();
    pages_.clear();
    pages_.push_back(std::make_unique<Pages>(bytes));
    float* const data = reinterpret_cast<float*>(pages_[0]->bytes().data());
    std::fill_n(data, bytes / sizeof(float), 0.0F);  // avoids slow values such as denormals
    const size_t share = bytes / sizeof(float) / ranks;
    run_ = [data, share, ranks] {
      if (ranks == 2) {  // the most frequent count, in one pass
        reduce_two_shares(data, data + share, share);
      } else {
        reduce_shares(data, share, ranks);
      }
    };
  }

  Numbers run(size_t samples, size_t calls) const { return timed(run_, samples, calls); }

 private:
  std::vector<std::unique_ptr<Pages>> pages_;
  std::unique_ptr<Triad> triad_;
  std::function<void()> run_;
};

}  // namespace
}  // namespace hbm::bench

int main() {
  using namespace hbm::bench;
  Bounds bounds;
  return serve({{"triad",
                 [&](const Words& words) {
                   bounds.triad(number(words, 0), number(words, 1));
                   return Numbers();
                 }},
                {"bound",
                 [&](const Words& words) {
                   bounds.bound(number(words, 0), number(words, 1));
                   return Numbers();
                 }},
                {"run", [&](const Words& words) {
                   return bounds.run(number(words, 0), number(words, 1));
                 }}});
}
