// Ranks of one node as threads. Each has a segment, a control region in it, a ShmGroup and two
// queues, as a process would. They run the code of communicator/shm unchanged, so ThreadSanitizer
// checks the accesses of all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "communicator/communicator.h"
#include "communicator/shm/shm_group.h"
#include "progress/operation_queue.h"

namespace hbm::communicator::shm {

inline constexpr std::chrono::milliseconds kTimeout{60'000};

// A rank's segment. allocate() takes the first free range that is large enough. free() overwrites
// the block, and poisons it for AddressSanitizer. Threads: any.
class TestSegment {
 public:
  explicit TestSegment(size_t bytes);
  ~TestSegment();
  TestSegment(const TestSegment&) = delete;
  TestSegment& operator=(const TestSegment&) = delete;

  std::byte* base() const noexcept { return base_; }
  size_t size() const noexcept { return size_; }

  // Returns a block aligned to 64 bytes. Throws Error(kExhausted) if there is no room.
  std::byte* allocate(size_t bytes);
  void free(std::byte* block);
  size_t blocks() const;  // number of blocks in use

 private:
  const size_t size_;
  std::byte* const base_;
  mutable std::mutex mutex_;         // guards the maps
  std::map<size_t, size_t> free_;    // offset -> bytes
  std::map<size_t, size_t> in_use_;  // the same
};

struct NodeOptions {
  int size = 2;
  size_t chunk_bytes = 64 * 1024;
  size_t segment_bytes = size_t{8} << 20;
  bool oversubscribed = true;
  size_t threads = 1;  // threads that share a large reduction or copy of a rank
};

class TestNode;

// One rank, on its thread.
struct NodeRank {
  NodeRank(TestNode& node, int rank);
  ~NodeRank();
  NodeRank(const NodeRank&) = delete;
  NodeRank& operator=(const NodeRank&) = delete;

  // run() runs a collective to its end, and transfer() a send or a receive. They return the
  // operation's error, or null.
  std::exception_ptr run(OperationPtr collective, std::chrono::milliseconds timeout = kTimeout);
  std::exception_ptr transfer(OperationPtr operation, std::chrono::milliseconds timeout = kTimeout);

  // Makes this rank look like a dead process to the other ranks. REQUIRES: the rank calls nothing
  // afterwards.
  void die();

  TestNode& node;
  const int rank;
  const int size;
  const std::shared_ptr<TestSegment> segment;
  const std::shared_ptr<ShmGroup> shm_group;
  const std::shared_ptr<Communicator> collectives;
  const std::shared_ptr<progress::OperationQueue> ordered;
  const std::shared_ptr<progress::OperationQueue> transfers;
  uint64_t sequence = 0;
};

class TestNode {
 public:
  explicit TestNode(const NodeOptions& options);

  // Runs `body` as every rank, each in a thread, and waits for all. An exception of `body` fails
  // the test. If `body` hangs, the program ends.
  void run(const std::function<void(NodeRank&)>& body);

  const NodeOptions options;
  const std::vector<std::shared_ptr<TestSegment>> segments;  // by rank
  const std::vector<std::byte*> regions;                     // the same
  const std::vector<Descriptor> deaths;  // eventfds: readable once the rank is dead
};

inline void run_node(const NodeOptions& options, const std::function<void(NodeRank&)>& body) {
  TestNode(options).run(body);
}

}  // namespace hbm::communicator::shm
