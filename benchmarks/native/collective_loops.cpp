#include "collective_loops.h"

#include <sched.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <map>

#include "base/error.h"
#include "program.h"

namespace hbm::bench {
namespace {

// The numbers of elements in a rank's buffers, and the expected value of each received element.
struct Contents {
  size_t sent;
  size_t received;
  std::function<int(size_t)> expected;
};

// Returns the value of a rank's elements before the call. The values are small, so that every type
// can represent the sum over any number of ranks.
int own_value(int rank) { return rank < 15 ? rank + 1 : 0; }

class ContentsOf {
 public:
  ContentsOf(int rank, int size, size_t count) : rank_(rank), size_(size), count_(count) {}

  Contents allreduce() const { return {0, count_, sum()}; }
  Contents broadcast() const { return {0, count_, same(own_value(0))}; }
  Contents reduce() const { return {0, count_, root() ? sum() : same(own_value(rank_))}; }
  Contents allgather() const { return {share(), count_, of_senders()}; }
  Contents gather() const { return {share(), root() ? count_ : 0, of_senders()}; }
  Contents gather_in_place() const {
    return {0, root() ? count_ : share(), root() ? of_senders() : same(own_value(rank_))};
  }
  Contents scatter() const { return {root() ? count_ : 0, share(), same(own_value(0))}; }
  Contents reduce_scatter() const { return {count_, share(), sum()}; }
  Contents alltoall() const { return {count_, count_, of_senders()}; }
  Contents barrier() const { return {0, 0, same(0)}; }
  Contents sendrecv() const {
    const Pair pair(rank_, size_);
    return {0, count_, same(own_value(pair.whole && !pair.first ? pair.peer : rank_))};
  }

 private:
  bool root() const { return rank_ == 0; }
  size_t share() const { return share_of(count_, size_); }
  std::function<int(size_t)> sum() const {
    int sum = 0;
    for (int rank = 0; rank < size_; ++rank) sum += own_value(rank);
    return same(sum);
  }
  std::function<int(size_t)> of_senders() const {
    return [share = share()](size_t i) { return own_value(static_cast<int>(i / share)); };
  }
  static std::function<int(size_t)> same(int value) {
    return [value](size_t) { return value; };
  }

  const int rank_;
  const int size_;
  const size_t count_;
};

const std::map<std::string, Contents (ContentsOf::*)() const> kContents = {
    {"allreduce", &ContentsOf::allreduce},  {"broadcast", &ContentsOf::broadcast},
    {"reduce", &ContentsOf::reduce},        {"allgather", &ContentsOf::allgather},
    {"gather", &ContentsOf::gather},        {"gather_in_place", &ContentsOf::gather_in_place},
    {"scatter", &ContentsOf::scatter},      {"reduce_scatter", &ContentsOf::reduce_scatter},
    {"alltoall", &ContentsOf::alltoall},    {"barrier", &ContentsOf::barrier},
    {"sendrecv", &ContentsOf::sendrecv},    {"allreduce_staged", &ContentsOf::allreduce},
    {"gather_staged", &ContentsOf::gather}, {"broadcast_staged", &ContentsOf::broadcast},
};

Dtype dtype_of(const std::string& name) {
  for (const Dtype dtype :
       {Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat16, Dtype::kBFloat16, Dtype::kInt32}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw Error(ErrorKind::kInvalid, "no type \"" + name + "\"");
}

// Returns an array whose first bytes are `value` as an element. REQUIRES: 0 <= value <= 256.
std::array<std::byte, sizeof(double)> element_of(int value, Dtype dtype) {
  std::array<std::byte, sizeof(double)> found{};
  const auto single = static_cast<float>(value);
  if (dtype == Dtype::kFloat64) {
    const double number = value;
    std::memcpy(found.data(), &number, sizeof number);
  } else if (dtype == Dtype::kFloat32) {
    std::memcpy(found.data(), &single, sizeof single);
  } else if (dtype == Dtype::kInt32) {
    const int32_t number = value;
    std::memcpy(found.data(), &number, sizeof number);
  } else {
    const auto bits = std::bit_cast<uint32_t>(single);
    // float16 has 10 bits of mantissa, and an exponent biased by 15 instead of 127.
    const uint32_t half = value == 0 ? 0 : (bits >> 13) - ((127 - 15) << 10);
    const auto narrow = static_cast<uint16_t>(dtype == Dtype::kBFloat16 ? bits >> 16 : half);
    std::memcpy(found.data(), &narrow, sizeof narrow);
  }
  return found;
}

// A buffer of `count` elements.
class Elements {
 public:
  Elements(Collectives& collectives, size_t count, Dtype dtype)
      : dtype_(dtype), bytes_(count * element_size(dtype)) {
    if (count > 0) memory_ = collectives.allocate(bytes_);
  }

  std::byte* data() const { return memory_.get(); }

  void fill(int value) const {
    const auto element = element_of(value, dtype_);
    for (size_t at = 0; at < bytes_; at += element_size(dtype_)) {
      std::memcpy(data() + at, element.data(), element_size(dtype_));
    }
  }

  // Throws Error(kMismatch) if an element differs from the expected one.
  void check(const std::string& collective, const std::function<int(size_t)>& expected) const {
    for (size_t i = 0; i < bytes_ / element_size(dtype_); ++i) {
      const auto element = element_of(expected(i), dtype_);
      const std::byte* const found = data() + i * element_size(dtype_);
      if (std::memcmp(found, element.data(), element_size(dtype_)) == 0) continue;
      throw Error(ErrorKind::kMismatch,
                  "element " + std::to_string(i) + " of the " + collective + " is wrong");
    }
  }

 private:
  const Dtype dtype_;
  const size_t bytes_;
  std::shared_ptr<std::byte> memory_;
};

// One collective with buffers of one size. run() calls it repeatedly.
class Loop {
 public:
  // Makes the buffers, and checks the result of a first call. Leaves zeros in the buffers.
  Loop(Collectives& collectives, const std::string& collective, size_t bytes, Dtype dtype)
      : Loop(collectives, collective, bytes / element_size(dtype), dtype,
             contents(collectives, collective, bytes / element_size(dtype))) {}

  Numbers run(size_t samples, size_t calls) const { return timed(call_, samples, calls); }

 private:
  Loop(Collectives& collectives, const std::string& collective, size_t count, Dtype dtype,
       const Contents& contents)
      : sent_(collectives, contents.sent, dtype),
        received_(collectives, contents.received, dtype),
        call_(collectives.call(collective, {sent_.data(), received_.data(), count, dtype})) {
    sent_.fill(own_value(collectives.rank()));
    received_.fill(own_value(collectives.rank()));
    call_();
    received_.check(collective, contents.expected);
    sent_.fill(0);
    received_.fill(0);
  }

  static Contents contents(const Collectives& collectives, const std::string& collective,
                           size_t count) {
    const auto found = kContents.find(collective);
    if (found != kContents.end()) {
      return (ContentsOf(collectives.rank(), collectives.size(), count).*found->second)();
    }
    throw Error(ErrorKind::kInvalid, "no collective \"" + collective + "\"");
  }

  const Elements sent_;
  const Elements received_;
  const std::function<void()> call_;
};

// Binds this thread to its own processor, if there is one for each rank. Without the binding, the
// scheduler may leave two ranks on one processor for milliseconds after a wake-up, and the two
// ranks would alternate in every call.
void bind_to_processor(int rank, int size) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < size) return;
  int skip = rank;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (!CPU_ISSET(processor, &allowed) || skip-- > 0) continue;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(processor, &own);
    sched_setaffinity(0, sizeof own, &own);
    return;
  }
}

}  // namespace

std::shared_ptr<std::byte> Collectives::allocate(size_t bytes) {
  const auto pages = std::make_shared<Pages>(bytes);
  return {pages, pages->bytes().data()};
}

size_t share_of(size_t count, int size) {
  const auto ranks = static_cast<size_t>(size);
  if (count % ranks == 0) return count / ranks;
  throw Error(ErrorKind::kInvalid, std::to_string(count) + " elements have no equal parts on " +
                                       std::to_string(ranks) + " ranks");
}

int serve_collectives(const std::function<std::unique_ptr<Collectives>()>& join) {
  std::unique_ptr<Collectives> collectives;
  std::unique_ptr<Loop> loop;
  return serve(
      {{"ready",
        [&](const Words&) {
          collectives = join();
          bind_to_processor(collectives->rank(), collectives->size());
          return Numbers();
        }},
       {"prepare",
        [&](const Words& words) {
          loop.reset();  // frees its memory first
          loop = std::make_unique<Loop>(*collectives, words.at(0), number(words, 1),
                                        dtype_of(words.at(2)));
          return Numbers();
        }},
       {"run", [&](const Words& words) { return loop->run(number(words, 0), number(words, 1)); }}});
}

}  // namespace hbm::bench
