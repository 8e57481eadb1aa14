// Every collective and send/recv over real MPI, with random sizes, types and ways to wait, against
// plain loops over inputs that every rank can compute.
#include "mpi/collectives.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "mpi/point_to_point.h"
#include "mpi_ranks.h"

namespace hbm::mpi {
namespace {

template <typename T>
constexpr Dtype dtype_of() {
  if constexpr (std::is_same_v<T, uint8_t>) return Dtype::kUInt8;
  if constexpr (std::is_same_v<T, int32_t>) return Dtype::kInt32;
  if constexpr (std::is_same_v<T, int64_t>) return Dtype::kInt64;
  if constexpr (std::is_same_v<T, float>) return Dtype::kFloat32;
  if constexpr (std::is_same_v<T, double>) return Dtype::kFloat64;
}

template <typename T>
using Data = std::vector<T>;

// Values that a sum or a product of some ranks cannot overflow, yet rounds differently in another
// order.
template <typename T>
Data<T> make_data(uint64_t seed, size_t count) {
  std::minstd_rand random(static_cast<unsigned>(seed % 2147483646 + 1));
  Data<T> data(count);
  for (T& value : data) {
    if constexpr (std::is_floating_point_v<T>) {
      value = static_cast<T>(random()) / static_cast<T>(1 << 30);
    } else {
      value = static_cast<T>(random() % 5);
    }
  }
  return data;
}

template <typename T>
T combine(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kProduct:
      return static_cast<T>(a * b);
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

template <typename T>
Data<T> reduced(const std::vector<Data<T>>& inputs, ReduceOp op) {
  Data<T> result = inputs[0];
  for (size_t r = 1; r < inputs.size(); ++r) {
    for (size_t i = 0; i < result.size(); ++i) result[i] = combine(op, result[i], inputs[r][i]);
  }
  if (op == ReduceOp::kAvg) {
    for (T& value : result) value = static_cast<T>(value / static_cast<T>(inputs.size()));
  }
  return result;
}

// One rank's share of a trial. `shared_` draws the same on all ranks: what is done; `own_` draws
// differently: when and how. Operations may overlap; finish() waits for all and compares.
class Trial {
 public:
  Trial(const Rank& rank, const std::string& name, size_t chunk_bytes, unsigned seed)
      : group_(rank.group(name, chunk_bytes)),
        size_(rank.size),
        rank_(rank.rank),
        chunk_bytes_(chunk_bytes),
        shared_(seed),
        own_(seed + 1000 + static_cast<unsigned>(rank.rank)) {}

  template <typename T>
  void each_once() {
    allreduce<T>();
    reduce<T>();
    reduce_scatter<T>();
    broadcast<T>();
    allgather<T>();
    gather<T>();
    scatter<T>();
    alltoall<T>();
    barrier();
    ring<T>();
    any_source<T>();
  }

  void finish() {
    for (const Check& check : checks_) {
      check.queue->wait(check.ticket, Clock::now() + 2 * kPatience);
      EXPECT_TRUE(check.ticket->done()) << check.what;
      if (check.ticket->error()) std::rethrow_exception(check.ticket->error());
      EXPECT_TRUE(check.right()) << check.what << " on rank " << rank_ << " of " << size_;
    }
    checks_.clear();
  }

  // What a rank has sent is on its way only as long as it calls MPI, so none ends before the
  // others.
  void part() {
    finish();
    barrier();
    finish();
  }

 private:
  struct Check {
    std::shared_ptr<Queue> queue;
    std::shared_ptr<Ticket> ticket;
    std::string what;
    std::function<bool()> right;
  };

  size_t ranks() const { return static_cast<size_t>(size_); }
  size_t self() const { return static_cast<size_t>(rank_); }
  bool in_place() { return own_() % 2 == 0; }
  int root() { return static_cast<int>(shared_() % ranks()); }

  template <typename T>
  size_t count() {
    const size_t chunk = chunk_bytes_ / sizeof(T);
    const std::vector<size_t> choices = {0,    1, 2, 13, 101, 1009, chunk, chunk + 1, 5 * chunk - 1,
                                         20011};
    return choices[shared_() % choices.size()];
  }

  template <typename T>
  std::vector<size_t> counts() {
    std::vector<size_t> each;
    for (size_t r = 0; r < ranks(); ++r) each.push_back(count<T>());
    return each;
  }

  template <typename T>
  ReduceOp op() {
    constexpr std::array kOps = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax,
                                 ReduceOp::kAvg};
    return kOps[shared_() % (std::is_floating_point_v<T> ? 5 : 4)];
  }

  template <typename T>
  std::vector<Data<T>> inputs(const std::vector<size_t>& counts) {
    std::vector<Data<T>> all;
    for (const size_t count : counts) all.push_back(make_data<T>(shared_(), count));
    return all;
  }
  template <typename T>
  std::vector<Data<T>> inputs(size_t count) {
    return inputs<T>(std::vector<size_t>(ranks(), count));
  }

  template <typename T>
  static std::vector<Source> sources(const std::vector<Data<T>>& all) {
    std::vector<Source> views;
    for (const auto& data : all) views.push_back({data.data(), data.size()});
    return views;
  }
  template <typename T>
  static std::vector<Sink> sinks(std::vector<Data<T>>& all) {
    std::vector<Sink> views;
    for (auto& data : all) views.push_back({data.data(), data.size()});
    return views;
  }
  template <typename T>
  static std::shared_ptr<std::vector<Data<T>>> like(const std::vector<Data<T>>& all) {
    auto made = std::make_shared<std::vector<Data<T>>>();
    for (const auto& data : all) made->push_back(Data<T>(data.size()));
    return made;
  }

  void submit(const std::shared_ptr<Queue>& queue, std::unique_ptr<Operation> operation,
              std::function<bool()> right) {
    if (own_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_() % 500));
    std::string what = operation->describe();
    auto ticket = queue->enqueue(std::move(operation), kPatience, {});
    queue->launch(ticket, Mode::kAsync);
    if (own_() % 8 == 0) queue->test(ticket);
    checks_.push_back({queue, std::move(ticket), std::move(what), std::move(right)});
  }
  void collective(std::unique_ptr<Operation> operation, std::function<bool()> right) {
    submit(group_.collectives, std::move(operation), std::move(right));
    if (shared_() % 4 == 0) finish();
  }

  template <typename T>
  void allreduce() {
    const ReduceOp how = op<T>();
    const auto all = inputs<T>(count<T>());
    const auto in = std::make_shared<Data<T>>(all[self()]);
    const auto out = in_place() ? in : std::make_shared<Data<T>>(in->size());
    collective(make_allreduce(group_.channel, ++group_.sequence, in->data(), out->data(),
                              in->size(), dtype_of<T>(), how),
               [in, out, expected = reduced(all, how)] { return *out == expected; });
  }

  template <typename T>
  void reduce() {
    const ReduceOp how = op<T>();
    const int to = root();
    const auto all = inputs<T>(count<T>());
    const auto in = std::make_shared<Data<T>>(all[self()]);
    const auto out = in_place() ? in : std::make_shared<Data<T>>(in->size());
    const Data<T> expected = rank_ == to ? reduced(all, how) : *out;
    collective(make_reduce(group_.channel, ++group_.sequence, in->data(), out->data(), in->size(),
                           dtype_of<T>(), how, to),
               [in, out, expected] { return *out == expected; });
  }

  template <typename T>
  void reduce_scatter() {
    const ReduceOp how = op<T>();
    const auto sizes = counts<T>();
    std::vector<Data<T>> shards;  // everybody's input for this rank
    auto mine = std::make_shared<std::vector<Data<T>>>();
    for (size_t r = 0; r < ranks(); ++r) {
      auto all = inputs<T>(sizes);
      shards.push_back(all[self()]);
      if (r == self()) *mine = std::move(all);
    }
    const auto out = std::make_shared<Data<T>>(sizes[self()]);
    T* const to = in_place() ? (*mine)[self()].data() : out->data();
    collective(make_reduce_scatter(group_.channel, ++group_.sequence, sources(*mine), to,
                                   dtype_of<T>(), how),
               [mine, out, to, expected = reduced(shards, how)] {
                 return std::equal(expected.begin(), expected.end(), to);
               });
  }

  template <typename T>
  void broadcast() {
    const int from = root();
    const auto expected = make_data<T>(shared_(), count<T>());
    const auto data =
        std::make_shared<Data<T>>(rank_ == from ? expected : Data<T>(expected.size()));
    collective(make_broadcast(group_.channel, ++group_.sequence, data->data(), data->size(),
                              dtype_of<T>(), from),
               [data, expected] { return *data == expected; });
  }

  template <typename T>
  void allgather() {
    const auto all = inputs<T>(counts<T>());
    const auto in = std::make_shared<Data<T>>(all[self()]);
    const auto outputs = like(all);
    Source source{in->data(), in->size()};
    if (in_place()) {
      (*outputs)[self()] = *in;
      source.data = (*outputs)[self()].data();
    }
    collective(
        make_allgather(group_.channel, ++group_.sequence, source, sinks(*outputs), dtype_of<T>()),
        [in, outputs, all] { return *outputs == all; });
  }

  template <typename T>
  void gather() {
    const int to = root();
    const auto all = inputs<T>(counts<T>());
    const auto in = std::make_shared<Data<T>>(all[self()]);
    const auto expected = rank_ == to ? all : std::vector<Data<T>>{};
    const auto outputs = like(expected);
    collective(make_gather(group_.channel, ++group_.sequence, {in->data(), in->size()},
                           sinks(*outputs), dtype_of<T>(), to),
               [in, outputs, expected] { return *outputs == expected; });
  }

  template <typename T>
  void scatter() {
    const int from = root();
    const auto all = std::make_shared<std::vector<Data<T>>>(inputs<T>(counts<T>()));
    const auto out = std::make_shared<Data<T>>((*all)[self()].size());
    collective(make_scatter(group_.channel, ++group_.sequence,
                            rank_ == from ? sources(*all) : std::vector<Source>{},
                            {out->data(), out->size()}, dtype_of<T>(), from),
               [all, out, self = self()] { return *out == (*all)[self]; });
  }

  template <typename T>
  void alltoall() {
    auto mine = std::make_shared<std::vector<Data<T>>>();
    std::vector<Data<T>> expected;
    for (size_t r = 0; r < ranks(); ++r) {
      auto all = inputs<T>(counts<T>());
      expected.push_back(all[self()]);
      if (r == self()) *mine = std::move(all);
    }
    const auto outputs = like(expected);
    collective(make_alltoall(group_.channel, ++group_.sequence, sources(*mine), sinks(*outputs),
                             dtype_of<T>()),
               [mine, outputs, expected] { return *outputs == expected; });
  }

  void barrier() {
    collective(make_barrier(group_.channel, ++group_.sequence), [] { return true; });
  }

  // Two transfers with one tag from each rank to the next: they arrive in the order of issue.
  template <typename T>
  void ring() {
    if (size_ == 1) return;
    const int tag = static_cast<int>(shared_() % 5);
    for (int repeat = 0; repeat < 2; ++repeat) {
      const auto all = inputs<T>(counts<T>());
      const size_t before = (self() + ranks() - 1) % ranks();
      const auto in = std::make_shared<Data<T>>(all[self()]);
      const auto out = std::make_shared<Data<T>>(all[before].size());
      const auto source = std::make_shared<int>(kAnyRank);
      const auto receive = [&] {
        submit(group_.transfers,
               make_receive(group_.channel, {out->data(), out->size()}, dtype_of<T>(),
                            static_cast<int>(before), tag, source),
               [out, source, expected = all[before], before] {
                 return *out == expected && *source == static_cast<int>(before);
               });
      };
      const auto send = [&] {
        submit(group_.transfers,
               make_send(group_.channel, {in->data(), in->size()}, dtype_of<T>(),
                         (rank_ + 1) % size_, tag),
               [in] { return true; });
      };
      send();
      receive();
    }
    finish();
  }

  // Everybody sends to the root, which takes them as they come.
  template <typename T>
  void any_source() {
    const int tag = 100 + static_cast<int>(group_.sequence);  // no other trial's
    const int to = root();
    const auto all = inputs<T>(count<T>());
    if (rank_ != to) {
      const auto in = std::make_shared<Data<T>>(all[self()]);
      submit(group_.transfers,
             make_send(group_.channel, {in->data(), in->size()}, dtype_of<T>(), to, tag),
             [in] { return true; });
    } else {
      for (int peer = 1; peer < size_; ++peer) {
        const auto out = std::make_shared<Data<T>>(all[0].size());
        const auto source = std::make_shared<int>(kAnyRank);
        submit(group_.transfers,
               make_receive(group_.channel, {out->data(), out->size()}, dtype_of<T>(), kAnyRank,
                            tag, source),
               [out, source, all] { return *out == all.at(static_cast<size_t>(*source)); });
      }
    }
    finish();
  }

  Group group_;
  const int size_;
  const int rank_;
  const size_t chunk_bytes_;
  std::mt19937 shared_;
  std::mt19937 own_;
  std::vector<Check> checks_;
};

#if defined(__SANITIZE_THREAD__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

// In chunks of 512 bytes most operations take many rounds; in those of 96 KiB large messages take
// MPI's rendezvous path.
void try_all(const Rank& rank) {
  for (const size_t chunk_bytes : {512, 96 * 1024}) {
    const std::string name = "chunk" + std::to_string(chunk_bytes);
    Trial trial(rank, name, chunk_bytes, static_cast<unsigned>(rank.size));
    for (int repeat = 0; repeat < (rank.size > 4 || kSlow ? 1 : 3); ++repeat) {
      trial.each_once<float>();
      trial.each_once<uint8_t>();
      trial.each_once<double>();
      trial.each_once<int32_t>();
      trial.each_once<int64_t>();
    }
    trial.part();
  }
}

class MpiCollectives : public testing::TestWithParam<int> {};

TEST_P(MpiCollectives, GiveWhatPlainLoopsGive) {
  if (kSlow && GetParam() > 4) GTEST_SKIP() << "no more threads in a rank than with fewer ranks";
  run_ranks(GetParam(), try_all);
}

INSTANTIATE_TEST_SUITE_P(Ranks, MpiCollectives, testing::Values(1, 2, 3, 4, 8));

TEST(MpiCollectivesNodes, RanksOfTwoNodesInterleaved) {
  run_ranks(4, [](const Rank& rank) {
    setenv("HBMCOMM_NODE_ID", rank.rank % 2 == 0 ? "even" : "odd", 1);
    Trial trial(rank, "nodes", 4096, 1);
    trial.each_once<float>();
    trial.part();
  });
}

TEST(MpiCollectivesGroups, CutFromTheWorldOfTheFirst) {
  run_ranks(4, [](const Rank& rank) {
    Trial everyone(rank, "all", 4096, 1);
    const Rank in_pair{rank.rank / 2, 2, rank.directory};
    Trial pair(in_pair, rank.rank % 2 == 0 ? "even" : "odd", 4096, 2);
    pair.each_once<double>();
    everyone.each_once<int32_t>();
    pair.each_once<float>();
    pair.part();
    everyone.part();
  });
}

}  // namespace
}  // namespace hbm::mpi
