#include "shm_ranks.h"

#include <gtest/gtest.h>
#include <sanitizer/asan_interface.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "communicator/shm/communicator.h"

namespace hbm::communicator::shm {
namespace {

constexpr unsigned kLongestRun = 200;  // seconds
constexpr size_t kAlignment = 4096;
constexpr int kFreed = 0xDD;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

std::vector<std::shared_ptr<TestSegment>> make_segments(const NodeOptions& options) {
  std::vector<std::shared_ptr<TestSegment>> made;
  const RegionLayout layout(static_cast<size_t>(options.size), options.chunk_bytes);
  for (int rank = 0; rank < options.size; ++rank) {
    made.push_back(std::make_shared<TestSegment>(layout.total + options.segment_bytes));
  }
  return made;
}

std::vector<std::byte*> make_regions(const NodeOptions& options,
                                     const std::vector<std::shared_ptr<TestSegment>>& segments) {
  std::vector<std::byte*> made;
  const RegionLayout layout(segments.size(), options.chunk_bytes);
  for (const auto& segment : segments) {
    segment->allocate(kAlignment);  // so that regions do not start where segments do
    made.push_back(segment->allocate(layout.total));
    format_region(made.back(), layout);
  }
  return made;
}

std::vector<Descriptor> make_deaths(int size) {
  std::vector<Descriptor> made;
  for (int rank = 0; rank < size; ++rank) made.emplace_back(eventfd(0, EFD_CLOEXEC));
  return made;
}

std::shared_ptr<ShmGroup> make_shm_group(TestNode& node, int rank) {
  std::vector<LocalRank> local_ranks;
  for (size_t i = 0; i < node.segments.size(); ++i) {
    const auto& segment = node.segments[i];
    local_ranks.push_back({static_cast<int>(i), "rank " + std::to_string(i), segment->base(),
                           segment->size(), static_cast<size_t>(node.regions[i] - segment->base()),
                           static_cast<int>(i) == rank ? -1 : node.deaths[i].get()});
  }
  const auto own = node.segments[static_cast<size_t>(rank)];
  // The group keeps all segments, because a worker of a queue may release the ShmGroup after the
  // TestNode was destroyed.
  const auto keep = std::make_shared<std::vector<std::shared_ptr<TestSegment>>>(node.segments);
  return std::make_shared<ShmGroup>(
      ShmGroup::Setup{"the test's group", std::move(local_ranks), static_cast<size_t>(rank),
                      node.options.chunk_bytes, node.options.oversubscribed, node.options.threads,
                      keep, [own](size_t bytes) { return own->allocate(bytes); },
                      [own](std::byte* block) { own->free(block); }});
}

// Makes a queue as a process group has it. A failed collective fails the group; a failed send or
// receive fails alone.
std::shared_ptr<progress::OperationQueue> make_queue(progress::OperationQueue::Order order,
                                                     bool oversubscribed,
                                                     const std::shared_ptr<ShmGroup>& shm_group) {
  const auto failed = [order, shm_group](const std::exception_ptr& error) {
    if (order == progress::OperationQueue::Order::kUnordered) return;
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      shm_group->report(e.what(), e.kind() == ErrorKind::kDeath);
    }
  };
  const auto name_ranks = [](const std::vector<int>& ranks) {
    std::string text = "missing ranks:";
    for (const int rank : ranks) text += " " + std::to_string(rank);
    return text;
  };
  return progress::OperationQueue::create(
      order, oversubscribed, {{}, {}, failed, [shm_group] { shm_group->wake(); }, name_ranks});
}

std::exception_ptr run_on(progress::OperationQueue& queue, OperationPtr operation,
                          std::chrono::milliseconds timeout) {
  const auto request = queue.enqueue(std::move(operation), timeout, {});
  queue.launch(request, progress::Mode::kSync);
  return request->error();
}

}  // namespace

TestSegment::TestSegment(size_t bytes)
    : size_(round_up(bytes, kAlignment)),
      base_(static_cast<std::byte*>(std::aligned_alloc(kAlignment, size_))) {
  if (base_ == nullptr) throw std::bad_alloc();
  free_[0] = size_;
  ASAN_POISON_MEMORY_REGION(base_, size_);
}

TestSegment::~TestSegment() {
  ASAN_UNPOISON_MEMORY_REGION(base_, size_);
  std::free(base_);
}

std::byte* TestSegment::allocate(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const size_t wanted = round_up(bytes + 1, kCacheLine);  // at least a byte between blocks
  for (auto place = free_.begin(); place != free_.end(); ++place) {
    const auto [offset, room] = *place;
    if (room < wanted) continue;
    free_.erase(place);
    if (room > wanted) free_[offset + wanted] = room - wanted;
    in_use_[offset] = wanted;
    ASAN_UNPOISON_MEMORY_REGION(base_ + offset, bytes);
    return base_ + offset;
  }
  throw Error(ErrorKind::kExhausted,
              "no room for " + std::to_string(bytes) + " bytes in the test's segment");
}

void TestSegment::free(std::byte* block) {
  const std::lock_guard lock(mutex_);
  const auto found = in_use_.find(static_cast<size_t>(block - base_));
  ASSERT_NE(found, in_use_.end()) << "freed twice, or never allocated";
  auto [offset, bytes] = *found;
  in_use_.erase(found);
  ASAN_UNPOISON_MEMORY_REGION(block, bytes);
  std::memset(block, kFreed, bytes);
  ASAN_POISON_MEMORY_REGION(block, bytes);
  const auto after = free_.find(offset + bytes);
  if (after != free_.end()) {
    bytes += after->second;
    free_.erase(after);
  }
  auto before = free_.lower_bound(offset);
  if (before != free_.begin() && (--before)->first + before->second == offset) {
    before->second += bytes;
  } else {
    free_[offset] = bytes;
  }
}

size_t TestSegment::blocks() const {
  const std::lock_guard lock(mutex_);
  return in_use_.size();
}

NodeRank::NodeRank(TestNode& of, int own)
    : node(of),
      rank(own),
      size(of.options.size),
      segment(of.segments[static_cast<size_t>(own)]),
      shm_group(make_shm_group(of, own)),
      collectives(make_communicator(shm_group)),
      ordered(make_queue(progress::OperationQueue::Order::kOrdered, of.options.oversubscribed,
                         shm_group)),
      transfers(make_queue(progress::OperationQueue::Order::kUnordered, of.options.oversubscribed,
                           shm_group)) {}

NodeRank::~NodeRank() {
  ordered->stop();
  transfers->stop();
}

std::exception_ptr NodeRank::run(OperationPtr collective, std::chrono::milliseconds timeout) {
  return run_on(*ordered, std::move(collective), timeout);
}

std::exception_ptr NodeRank::transfer(OperationPtr operation, std::chrono::milliseconds timeout) {
  return run_on(*transfers, std::move(operation), timeout);
}

void NodeRank::die() { eventfd_write(node.deaths[static_cast<size_t>(rank)].get(), 1); }

TestNode::TestNode(const NodeOptions& chosen)
    : options(chosen),
      segments(make_segments(options)),
      regions(make_regions(options, segments)),
      deaths(make_deaths(options.size)) {}

void TestNode::run(const std::function<void(NodeRank&)>& body) {
  alarm(kLongestRun);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.size; ++rank) {
    threads.emplace_back([this, rank, &body] {
      try {
        NodeRank self(*this, rank);
        body(self);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  alarm(0);
}

}  // namespace hbm::communicator::shm
