#include "staged_mpi.h"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "memory/segment.h"

namespace hbm::bench {
namespace {

// The largest chunk of hbm (kLargestChunkBytes).
constexpr size_t kChunk = size_t{512} << 10;
constexpr size_t kInFlight = 2;    // chunks, or blocks of an allreduce
constexpr size_t kOneShot = 4096;  // bytes of an allreduce in which each rank sums all tensors

// Nonblocking messages of bytes, and the waits for them.
class Messages {
 public:
  explicit Messages(const MpiWorld& world)
      : isend_(world.function<decltype(::MPI_Isend)>("MPI_Isend")),
        irecv_(world.function<decltype(::MPI_Irecv)>("MPI_Irecv")),
        waitall_(world.function<decltype(::MPI_Waitall)>("MPI_Waitall")) {}

  void send(std::vector<MPI_Request>& requests, const void* data, size_t bytes, int peer) {
    note(isend_(data, static_cast<int>(bytes), MPI_BYTE, peer, 0, MPI_COMM_WORLD,
                &requests.emplace_back()));
  }
  void receive(std::vector<MPI_Request>& requests, void* data, size_t bytes, int peer) {
    note(irecv_(data, static_cast<int>(bytes), MPI_BYTE, peer, 0, MPI_COMM_WORLD,
                &requests.emplace_back()));
  }
  void wait(std::vector<MPI_Request>& requests) {
    note(waitall_(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE));
    requests.clear();
  }

  // Returns the first error since the last call.
  int error() { return std::exchange(error_, MPI_SUCCESS); }

 private:
  void note(int code) {
    if (error_ == MPI_SUCCESS) error_ = code;
  }

  decltype(::MPI_Isend)* const isend_;
  decltype(::MPI_Irecv)* const irecv_;
  decltype(::MPI_Waitall)* const waitall_;
  int error_ = MPI_SUCCESS;
};

template <class Element>
void add(std::byte* sum, const std::byte* other, size_t bytes) {
  auto* const to = reinterpret_cast<Element*>(sum);
  const auto* const from = reinterpret_cast<const Element*>(other);
  for (size_t i = 0; i < bytes / sizeof(Element); ++i) to[i] += from[i];
}

class StagedCollectives {
 public:
  StagedCollectives(const MpiWorld& world, const CollectiveBuffers& buffers)
      : rank_(world.rank),
        size_(world.size),
        messages_(world),
        sent_(static_cast<const std::byte*>(buffers.sent)),
        data_(static_cast<std::byte*>(buffers.received)),
        element_(element_size(buffers.dtype)),
        bytes_(buffers.count * element_),
        add_(buffers.dtype == Dtype::kFloat32   ? add<float>
             : buffers.dtype == Dtype::kFloat64 ? add<double>
                                                : add<int32_t>) {
    const auto segment = memory::process_segment(memory::Policy::kPreferred);
    const auto buffers_needed = kInFlight * (3 * static_cast<size_t>(size_) + 1);
    staging_ = {static_cast<std::byte*>(segment->allocate(buffers_needed * kChunk)),
                [segment](std::byte* block) { segment->free(block); }};
  }

  int broadcast() {
    const size_t chunks = divided(bytes_, kChunk);
    if (rank_ == 0) {
      give(data_, bytes_, [&](auto& requests, std::byte* buffer, size_t bytes) {
        for (int peer = 1; peer < size_; ++peer) messages_.send(requests, buffer, bytes, peer);
      });
      return messages_.error();
    }
    take(
        chunks,
        [&](size_t, size_t chunk, std::byte*& to) {
          to = data_ + chunk * kChunk;
          return std::min(kChunk, bytes_ - chunk * kChunk);
        },
        1);
    return messages_.error();
  }

  int gather() {
    const size_t part = bytes_ / static_cast<size_t>(size_);
    if (rank_ != 0) {
      give(sent_, part, [&](auto& requests, std::byte* buffer, size_t bytes) {
        messages_.send(requests, buffer, bytes, 0);
      });
      return messages_.error();
    }
    std::memcpy(data_, sent_, part);
    take(
        divided(part, kChunk),
        [&](size_t peer, size_t chunk, std::byte*& to) {
          to = data_ + (peer + 1) * part + chunk * kChunk;
          return std::min(kChunk, part - chunk * kChunk);
        },
        static_cast<size_t>(size_) - 1);
    return messages_.error();
  }

  int allreduce() {
    if (bytes_ <= kOneShot) return one_shot();
    const size_t block = kChunk * static_cast<size_t>(size_);
    const size_t blocks = divided(bytes_, block);
    begin(0);
    for (size_t b = 0; b < blocks; ++b) {
      pass(b);
      if (b > 0) finish(b - 1);
      if (b + 1 < blocks) begin(b + 1);
    }
    finish(blocks - 1);
    return messages_.error();
  }

 private:
  struct Share {
    std::byte* data;
    size_t bytes;
  };

  static size_t divided(size_t dividend, size_t divisor) {
    return std::max<size_t>((dividend + divisor - 1) / divisor, 1);
  }

  std::byte* buffer(size_t index) const { return staging_.get() + index * kChunk; }
  std::vector<MPI_Request>& requests(size_t index) { return requests_[index % kInFlight]; }

  // Stages `bytes` bytes chunk by chunk, and sends each chunk by `post`.
  template <class Post>
  void give(const std::byte* from, size_t bytes, const Post& post) {
    for (size_t chunk = 0; chunk < divided(bytes, kChunk); ++chunk) {
      messages_.wait(requests(chunk));
      const size_t length = std::min(kChunk, bytes - chunk * kChunk);
      std::memcpy(buffer(chunk % kInFlight), from + chunk * kChunk, length);
      post(requests(chunk), buffer(chunk % kInFlight), length);
    }
    for (size_t chunk = 0; chunk < kInFlight; ++chunk) messages_.wait(requests(chunk));
  }

  // Receives `chunks` chunks from each of the first `peers` other ranks in turn. `place` sets the
  // target of a peer's chunk, and returns its bytes.
  template <class Place>
  void take(size_t chunks, const Place& place, size_t peers) {
    const auto for_each = [&](size_t chunk, const auto& use) {
      for (size_t peer = 0; peer < peers; ++peer) {
        std::byte* to = nullptr;
        const size_t bytes = place(peer, chunk, to);
        use(peer, to, bytes, buffer(chunk % kInFlight * peers + peer));
      }
    };
    const auto post = [&](size_t chunk) {
      for_each(chunk, [&](size_t peer, std::byte*, size_t bytes, std::byte* staged) {
        const int from = rank_ == 0 ? static_cast<int>(peer) + 1 : 0;
        messages_.receive(requests(chunk), staged, bytes, from);
      });
    };
    for (size_t chunk = 0; chunk < std::min(chunks, kInFlight); ++chunk) post(chunk);
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      messages_.wait(requests(chunk));
      for_each(chunk, [&](size_t, std::byte* to, size_t bytes, const std::byte* staged) {
        std::memcpy(to, staged, bytes);
      });
      if (chunk + kInFlight < chunks) post(chunk + kInFlight);
    }
  }

  Share share(size_t block, int owner) const {
    const auto ranks = static_cast<size_t>(size_);
    const size_t start = block * kChunk * ranks;
    const size_t elements = std::min(kChunk * ranks, bytes_ - start) / element_;
    const size_t each = divided(elements, ranks);
    const size_t first = std::min(static_cast<size_t>(owner) * each, elements);
    return {data_ + start + first * element_, std::min(each, elements - first) * element_};
  }

  // The staging buffers of a block: of shares to send, of shares received, and of the sum. In the
  // second phase, the sums of other ranks replace the shares that were sent.
  std::byte* outgoing(size_t block, int peer) const { return of_block(block, peer); }
  std::byte* arriving(size_t block, int peer) const { return of_block(block, size_ + peer); }
  std::byte* summed(size_t block, int peer) const { return of_block(block, 2 * size_ + peer); }
  std::byte* of_block(size_t block, int index) const {
    const auto each = static_cast<size_t>(3 * size_);
    return buffer(block % kInFlight * each + static_cast<size_t>(index));
  }

  template <class Use>
  void for_peers(const Use& use) {
    for (int step = 1; step < size_; ++step) use((rank_ + step) % size_);
  }

  // Sends each other rank its share of a block.
  void begin(size_t block) {
    const size_t mine = share(block, rank_).bytes;
    for_peers(
        [&](int peer) { messages_.receive(requests(block), arriving(block, peer), mine, peer); });
    for_peers([&](int peer) {
      const Share theirs = share(block, peer);
      std::memcpy(outgoing(block, peer), theirs.data, theirs.bytes);
      messages_.send(requests(block), outgoing(block, peer), theirs.bytes, peer);
    });
  }

  // Sums this rank's share of a block, and sends the sum to all other ranks.
  void pass(size_t block) {
    messages_.wait(requests(block));
    const Share mine = share(block, rank_);
    for_peers([&](int peer) { add_(mine.data, arriving(block, peer), mine.bytes); });
    for_peers([&](int peer) {
      messages_.receive(requests(block), summed(block, peer), share(block, peer).bytes, peer);
    });
    std::memcpy(summed(block, rank_), mine.data, mine.bytes);
    for_peers(
        [&](int peer) { messages_.send(requests(block), summed(block, rank_), mine.bytes, peer); });
  }

  void finish(size_t block) {
    messages_.wait(requests(block));
    for_peers([&](int peer) {
      const Share theirs = share(block, peer);
      std::memcpy(theirs.data, summed(block, peer), theirs.bytes);
    });
  }

  int one_shot() {
    for_peers([&](int peer) { messages_.receive(requests(0), arriving(0, peer), bytes_, peer); });
    std::memcpy(outgoing(0, rank_), data_, bytes_);
    for_peers([&](int peer) { messages_.send(requests(0), outgoing(0, rank_), bytes_, peer); });
    messages_.wait(requests(0));
    for_peers([&](int peer) { add_(data_, arriving(0, peer), bytes_); });
    return messages_.error();
  }

  const int rank_;
  const int size_;
  Messages messages_;
  const std::byte* const sent_;
  std::byte* const data_;
  const size_t element_;
  const size_t bytes_;
  void (*const add_)(std::byte*, const std::byte*, size_t);
  std::shared_ptr<std::byte> staging_;
  std::array<std::vector<MPI_Request>, kInFlight> requests_;
};

}  // namespace

std::function<int()> staged_call(const MpiWorld& world, const std::string& collective,
                                 const CollectiveBuffers& buffers) {
  int (StagedCollectives::*call)() = nullptr;
  if (collective == "allreduce_staged") call = &StagedCollectives::allreduce;
  if (collective == "broadcast_staged") call = &StagedCollectives::broadcast;
  if (collective == "gather_staged") call = &StagedCollectives::gather;
  if (call == nullptr) return {};
  return [call, staged = std::make_shared<StagedCollectives>(world, buffers)] {
    return (*staged.*call)();
  };
}

}  // namespace hbm::bench
