// The program "slot_loops": collectives of plain loops through slots in shared memory. It shows
// what staging costs on this machine at the least, for private tensors of float32. No rank checks
// its peers, sleeps, or ends a wait.
//
//   slot_loops DIRECTORY RANK SIZE LIBRARIES SLOT_BYTES
//
// LIBRARIES is not used. serve_collectives() answers the commands.
//
// Each pair of ranks has rings of slots. A chunk of a tensor is as long as a slot for each rank. So
// the slots stay in the processors' caches, and a rank works on a chunk while its peers work on the
// chunks before and after it.
//
// Memory order: push() releases the slot's data by its store of `filled`, and front() acquires it.
// pop() releases the slot for reuse by its store of `emptied`, and back() acquires it.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "collective_loops.h"

namespace hbm::bench {
namespace {

constexpr size_t kSlots = 8;  // of a ring
constexpr int kPolls = 2000;  // before a waiting rank yields its processor in each poll

// The part of a ring that both ranks see. The slots follow it in memory.
struct RingState {
  alignas(64) std::atomic<uint64_t> filled;   // slots that the writer has filled
  alignas(64) std::atomic<uint64_t> emptied;  // slots that the reader has emptied
};

// One rank's end of a ring. Threads: one.
class Ring {
 public:
  Ring(std::byte* memory, size_t slot_bytes)
      : state_(reinterpret_cast<RingState*>(memory)),
        slots_(memory + sizeof(RingState)),
        slot_bytes_(slot_bytes) {}

  static size_t bytes(size_t slot_bytes) { return sizeof(RingState) + kSlots * slot_bytes; }

  // Waits for the next slot to fill, and returns it. push() then hands it to the reader.
  float* back() {
    await(state_->emptied, done_ + 1 - std::min<uint64_t>(done_ + 1, kSlots));
    return slot();
  }
  void push() { state_->filled.store(++done_, std::memory_order_release); }

  // Waits for the next filled slot, and returns it. pop() then returns it to the writer.
  const float* front() {
    await(state_->filled, done_ + 1);
    return slot();
  }
  void pop() { state_->emptied.store(++done_, std::memory_order_release); }

 private:
  static void await(const std::atomic<uint64_t>& count, uint64_t least) {
    for (int polls = 0; count.load(std::memory_order_acquire) < least; ++polls) {
      if (polls > kPolls) sched_yield();
    }
  }

  float* slot() const { return reinterpret_cast<float*>(slots_ + done_ % kSlots * slot_bytes_); }

  RingState* const state_;
  std::byte* const slots_;
  const size_t slot_bytes_;
  uint64_t done_ = 0;  // slots that this end has filled, or emptied
};

// The rings between this rank and each other rank, in a file that all ranks map.
class Rings {
 public:
  enum Kind { kParts, kSums, kKinds };

  Rings(const std::string& directory, size_t rank, size_t size, size_t slot_bytes) {
    const size_t each = Ring::bytes(slot_bytes);
    const size_t total = kKinds * size * size * each;
    const int file = open((directory + "/slots").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(total)) != 0) {
      throw Error(ErrorKind::kInvalid, "cannot make " + directory + "/slots");
    }
    void* const mapped = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                              file, 0);  // until the program ends
    close(file);
    if (mapped == MAP_FAILED) throw Error(ErrorKind::kInvalid, "cannot map the slots");
    for (size_t kind = 0; kind < kKinds; ++kind) {
      for (size_t peer = 0; peer < size; ++peer) {
        const auto at = [&](size_t from, size_t to) {
          return static_cast<std::byte*>(mapped) + ((kind * size + from) * size + to) * each;
        };
        to_[kind].emplace_back(at(rank, peer), slot_bytes);
        from_[kind].emplace_back(at(peer, rank), slot_bytes);
      }
    }
  }

  Ring& to(Kind kind, size_t peer) { return to_[kind][peer]; }
  Ring& from(Kind kind, size_t peer) { return from_[kind][peer]; }

 private:
  std::vector<Ring> to_[kKinds];
  std::vector<Ring> from_[kKinds];
};

class SlotCollectives final : public Collectives {
 public:
  SlotCollectives(const std::string& directory, int rank, int size, size_t slot_bytes)
      : rank_(static_cast<size_t>(rank)),
        size_(static_cast<size_t>(size)),
        slot_(slot_bytes / sizeof(float)),
        rings_(directory, rank_, size_, slot_bytes) {}

  int rank() const override { return static_cast<int>(rank_); }
  int size() const override { return static_cast<int>(size_); }

  std::function<void()> call(const std::string& collective,
                             const CollectiveBuffers& buffers) override {
    if (buffers.dtype != Dtype::kFloat32) {
      throw Error(ErrorKind::kInvalid, "slots are measured in float32");
    }
    float* const data = static_cast<float*>(buffers.received);
    const size_t count = buffers.count;
    if (collective == "allreduce") return [=, this] { allreduce(data, count); };
    if (collective == "broadcast") return [=, this] { broadcast(data, count); };
    if (collective == "sendrecv") return [=, this] { sendrecv(data, count); };
    throw Error(ErrorKind::kInvalid, "slots have no loop of \"" + collective + "\"");
  }

 private:
  struct Part {
    float* data;
    size_t count;
  };

  // Returns a rank's part of a chunk of size_ slots.
  Part part(float* data, size_t count, size_t chunk, size_t rank) const {
    const size_t begin = chunk * size_ * slot_;
    const size_t each = (std::min(count - begin, size_ * slot_) + size_ - 1) / size_;
    const size_t first = std::min(begin + rank * each, count);
    return {data + first, std::min(each, count - first)};
  }

  // In turn i a rank works on three chunks. It gives away the other ranks' parts of chunk i, and
  // sums its own part of chunk i - 1. It takes the other ranks' sums of chunk i - 2.
  void allreduce(float* data, size_t count) {
    const size_t chunks = (count + size_ * slot_ - 1) / (size_ * slot_);
    for (size_t turn = 0; turn < chunks + 2; ++turn) {
      if (turn < chunks) {
        for_peers([&](size_t peer) {
          put(rings_.to(Rings::kParts, peer), part(data, count, turn, peer));
        });
      }
      if (turn >= 1 && turn <= chunks) sum(part(data, count, turn - 1, rank_));
      if (turn >= 2) {
        for_peers([&](size_t peer) {
          take(rings_.from(Rings::kSums, peer), part(data, count, turn - 2, peer));
        });
      }
    }
  }

  void sum(const Part& mine) {
    for_peers([&](size_t peer) {
      const float* const theirs = rings_.from(Rings::kParts, peer).front();
      if (size_ == 2) {  // one pass
        float* const result = rings_.to(Rings::kSums, peer).back();
        for (size_t i = 0; i < mine.count; ++i) result[i] = mine.data[i] = mine.data[i] + theirs[i];
        rings_.to(Rings::kSums, peer).push();
      } else {
        for (size_t i = 0; i < mine.count; ++i) mine.data[i] += theirs[i];
      }
      rings_.from(Rings::kParts, peer).pop();
    });
    if (size_ > 2) for_peers([&](size_t peer) { put(rings_.to(Rings::kSums, peer), mine); });
  }

  void broadcast(float* data, size_t count) {
    for (size_t at = 0; at < count; at += slot_) {
      const Part slice{data + at, std::min(slot_, count - at)};
      if (rank_ != 0) {
        take(rings_.from(Rings::kParts, 0), slice);
      } else {
        for_peers([&](size_t peer) { put(rings_.to(Rings::kParts, peer), slice); });
      }
    }
  }

  void sendrecv(float* data, size_t count) {
    const Pair pair(rank(), size());
    if (!pair.whole) return;
    for (const bool sends : {pair.first, !pair.first}) {
      for (size_t at = 0; at < count; at += slot_) {
        const Part slice{data + at, std::min(slot_, count - at)};
        const auto peer = static_cast<size_t>(pair.peer);
        sends ? put(rings_.to(Rings::kParts, peer), slice)
              : take(rings_.from(Rings::kParts, peer), slice);
      }
    }
  }

  static void put(Ring& ring, const Part& part) {
    std::memcpy(ring.back(), part.data, part.count * sizeof(float));
    ring.push();
  }

  static void take(Ring& ring, const Part& part) {
    std::memcpy(part.data, ring.front(), part.count * sizeof(float));
    ring.pop();
  }

  template <typename Action>
  void for_peers(const Action& action) const {
    for (size_t peer = 0; peer < size_; ++peer) {
      if (peer != rank_) action(peer);
    }
  }

  const size_t rank_;
  const size_t size_;
  const size_t slot_;  // elements
  Rings rings_;
};

}  // namespace
}  // namespace hbm::bench

int main(int argc, char** argv) {
  using namespace hbm::bench;
  if (argc != 6) return 2;
  return serve_collectives([&] {
    return std::make_unique<SlotCollectives>(argv[1], std::stoi(argv[2]), std::stoi(argv[3]),
                                             std::stoul(argv[5]));
  });
}
