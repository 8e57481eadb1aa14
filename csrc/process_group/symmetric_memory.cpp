#include "process_group/symmetric_memory.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "communicator/shared_window.h"
#include "memory/policy.h"
#include "memory/segment.h"
#include "pg_hbm.h"
#include "process_group/python_lock.h"
#include "process_group/torch_version.h"
#include "process_group/types.h"
#include "process_group/window.h"

namespace hbm::process_group {
namespace {

using c10d::symmetric_memory::SymmetricMemory;
using c10d::symmetric_memory::SymmetricMemoryAllocator;
using communicator::kSignalChannels;
using communicator::SharedWindow;

constexpr size_t kSignalPadAlignment = 64;
constexpr size_t kMostBlockBytes = std::numeric_limits<int64_t>::max() / 2;
constexpr size_t kMostTimeoutMilliseconds = 1'000'000'000'000;

// Runs `call` without Python's lock, and converts its errors.
template <typename Call>
void unlocked(const Call& call) {
  translated([&] { without_python_lock(call); });
}

std::chrono::milliseconds timeout_of(size_t milliseconds) {
  if (milliseconds == 0) return c10d::kUnsetTimeout;
  return std::chrono::milliseconds(std::min(milliseconds, kMostTimeoutMilliseconds));
}

// The result of a rendezvous.
class SymmetricMemoryHbm final : public SymmetricMemory {
 public:
  // The window's tensors have `bytes` bytes of data, and the signal pad from `pad` on. `life`
  // expires when this rank no longer uses the window.
  SymmetricMemoryHbm(c10::intrusive_ptr<WindowHbm> window, std::shared_ptr<const void> life,
                     size_t bytes, size_t pad);
  ~SymmetricMemoryHbm() override;

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pads_; }
  void** get_buffer_ptrs_dev() override { return buffers_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pads_.data(); }
  size_t get_buffer_size() override { return bytes_; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }

  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;

  int get_rank() override { return window_->group()->getRank(); }
  int get_world_size() override { return static_cast<int>(buffers_.size()); }
  c10::Device get_device() override { return c10::Device(c10::kCPU); }
  const std::vector<int>& get_rank_to_global_rank() override { return global_ranks_; }
  int* get_rank_to_global_rank_dev() override { return global_ranks_.data(); }
  bool world_within_direct_access() override { return true; }

  // Returns true if this is a rendezvous of the present members of `group`.
  bool serves(const c10::intrusive_ptr<ProcessGroupHbm>& group) const {
    return window_->group() == group && window_->current();
  }

 private:
  void require_whole(int channel, const char* operation) const;

  c10::intrusive_ptr<WindowHbm> window_;
  std::shared_ptr<const void> life_;
  const size_t bytes_;
  std::vector<void*> buffers_;                               // by rank
  std::vector<void*> pads_;                                  // by rank
  std::vector<int> global_ranks_;                            // by rank
  std::array<std::atomic<bool>, kSignalChannels> failed_{};  // a barrier on the channel failed
};

// A use of a block by the ranks of a group.
struct Sharing {
  std::shared_ptr<SharedWindow> window;
  std::weak_ptr<const void> life;  // expired: this rank no longer uses the window
};

struct Block {
  std::shared_ptr<memory::SharedSegment> segment;
  size_t bytes = 0;  // of the data
  size_t pad = 0;    // the offset of the signal pad
  size_t pad_bytes = 0;
  std::optional<std::string> group;                                        // given to alloc()
  std::map<std::string, c10::intrusive_ptr<SymmetricMemoryHbm>> memories;  // by group
  std::vector<Sharing> uses;
  bool freed = false;    // the tensor is gone; other ranks may still use the block
  bool exposed = false;  // a rendezvous failed here, and other ranks may use the block for good
};

// The blocks of this process, by address.
struct Blocks {
  std::mutex mutex;  // guards `blocks`; no thread waits or drops a group while it holds it
  std::map<void*, Block> blocks;

  // Returns the block of a tensor. REQUIRES: the caller holds `mutex`.
  Block& at(void* address, const char* operation) {
    const auto found = blocks.find(address);
    if (found != blocks.end() && !found->second.freed) return found->second;
    throw Error(ErrorKind::kInvalid,
                std::string(operation) +
                    ": the tensor is not symmetric memory; make it by "
                    "torch.distributed._symmetric_memory.empty(..., device=\"cpu\")");
  }

  // Releases the windows that this rank no longer uses, and frees the blocks that no rank uses.
  void reclaim();
};

// A forked child has no blocks. The parent's blocks stay the parent's.
Blocks& blocks() { return per_process<Blocks>(); }

void Blocks::reclaim() {
  std::vector<std::shared_ptr<SharedWindow>> closed;  // destroyed after the lock is released
  const std::lock_guard lock(mutex);
  for (auto next = blocks.begin(); next != blocks.end();) {
    const auto found = next++;
    Block& block = found->second;
    std::erase_if(block.uses, [&](const Sharing& use) {
      if (!use.life.expired() || !use.window->release() || !use.window->released()) return false;
      use.window->close();
      closed.push_back(use.window);
      return true;
    });
    if (!block.freed || block.exposed || !block.uses.empty()) continue;
    block.segment->free(found->first);
    blocks.erase(found);
  }
}

SymmetricMemoryHbm::SymmetricMemoryHbm(c10::intrusive_ptr<WindowHbm> window,
                                       std::shared_ptr<const void> life, size_t bytes, size_t pad)
    : window_(std::move(window)), life_(std::move(life)), bytes_(bytes) {
  const auto& group = window_->group();
  const auto options =
      c10::dynamic_intrusive_pointer_cast<GroupOptions>(group->getBackendOptions());
  global_ranks_ = options->numbers_in_job(group->getSize());
  int64_t first = 0;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const at::Tensor part = window_->map_remote_tensor(rank);
    if (rank == 0) first = part.numel();
    if (part.numel() != first) {
      throw Error(ErrorKind::kMismatch,
                  "rendezvous: with its signal pad, the tensor of rank 0 has " +
                      std::to_string(first) + " bytes, and that of rank " + std::to_string(rank) +
                      " has " + std::to_string(part.numel()) +
                      "; make tensors of one size on all ranks");
    }
    auto* const data = static_cast<std::byte*>(part.mutable_data_ptr());
    buffers_.push_back(data);
    pads_.push_back(data + pad);
  }
}

SymmetricMemoryHbm::~SymmetricMemoryHbm() {
  life_.reset();
  blocks().reclaim();
}

void SymmetricMemoryHbm::require_whole(int channel, const char* operation) const {
  if (channel < 0 || channel >= kSignalChannels || !failed_[static_cast<size_t>(channel)]) return;
  throw Error(ErrorKind::kAborted,
              std::string(operation) + ": a barrier on channel " + std::to_string(channel) +
                  " failed earlier on this rank, so signals may be left there; use another channel "
                  "on all ranks, or make another tensor");
}

void SymmetricMemoryHbm::put_signal(int dst_rank, int channel, size_t timeout_ms) {
  unlocked([&] {
    require_whole(channel, "put_signal");
    window_->signal_on(dst_rank, channel, /*async=*/false, timeout_of(timeout_ms));
  });
}

void SymmetricMemoryHbm::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  unlocked([&] {
    require_whole(channel, "wait_signal");
    window_->wait_signal_on(src_rank, channel, /*async=*/false, timeout_of(timeout_ms));
  });
}

void SymmetricMemoryHbm::barrier(int channel, size_t timeout_ms) {
  unlocked([&] {
    window_->require_no_batch("barrier");
    require_whole(channel, "barrier");
    const std::chrono::milliseconds timeout = timeout_of(timeout_ms);
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    try {
      for (int rank = 0; rank < get_world_size(); ++rank) {
        if (rank == get_rank()) continue;
        works.push_back(window_->signal_on(rank, channel, /*async=*/true, timeout));
        works.push_back(window_->wait_signal_on(rank, channel, /*async=*/true, timeout));
      }
      for (const auto& work : works) work->wait();
    } catch (...) {
      if (!works.empty()) failed_[static_cast<size_t>(channel)] = true;
      throw;
    }
  });
}

class SymmetricMemoryAllocatorHbm final : public SymmetricAllocatorBase<SymmetricMemoryAllocator> {
 public:
  void* alloc(size_t size, int device_idx, const std::optional<std::string>& group_name) override;
  void free(void* ptr) override;
  size_t get_alloc_size(void* ptr) override {
    return translated([&] {
      const std::lock_guard lock(blocks().mutex);
      return blocks().at(ptr, "get_alloc_size").bytes;
    });
  }
  c10::intrusive_ptr<SymmetricMemory> rendezvous(
      void* ptr, const std::optional<std::string>& group_name) override {
    c10::intrusive_ptr<SymmetricMemory> met;
    unlocked([&] { met = meet(ptr, group_name); });
    return met;
  }
  bool has_multicast_support(int /*device_idx*/) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return kBackendName; }
  bool has_allocation(void* ptr) override {
    const std::lock_guard lock(blocks().mutex);
    const auto found = blocks().blocks.find(ptr);
    return found != blocks().blocks.end() && !found->second.freed;
  }

 private:
  static c10::intrusive_ptr<SymmetricMemory> meet(void* ptr,
                                                  const std::optional<std::string>& group_name);
};

void* SymmetricMemoryAllocatorHbm::alloc(size_t size, int /*device_idx*/,
                                         const std::optional<std::string>& group_name) {
  return translated([&] {
    blocks().reclaim();
    if (size > kMostBlockBytes) {
      throw Error(ErrorKind::kExhausted, "symmetric memory: a tensor of " + std::to_string(size) +
                                             " bytes is larger than the address space");
    }
    Block block;
    block.segment = memory::process_segment(GroupOptions::from_environment()->policy);
    block.bytes = size;
    block.pad = (size + kSignalPadAlignment - 1) / kSignalPadAlignment * kSignalPadAlignment;
    block.pad_bytes = c10d::symmetric_memory::get_signal_pad_size();
    block.group = group_name;
    const std::shared_ptr<memory::SharedSegment> segment = block.segment;
    auto* const data = static_cast<std::byte*>(segment->allocate(block.pad + block.pad_bytes));
    std::memset(data + block.pad, 0, block.pad_bytes);
    const std::lock_guard lock(blocks().mutex);
    blocks().blocks.emplace(data, std::move(block));
    return static_cast<void*>(data);
  });
}

void SymmetricMemoryAllocatorHbm::free(void* ptr) {
  std::map<std::string, c10::intrusive_ptr<SymmetricMemoryHbm>> dropped;
  {
    const std::lock_guard lock(blocks().mutex);
    const auto found = blocks().blocks.find(ptr);
    if (found == blocks().blocks.end()) return;  // in a forked child
    found->second.freed = true;
    dropped.swap(found->second.memories);
  }
  dropped.clear();
  blocks().reclaim();
}

// Returns the group of hbm with this name.
c10::intrusive_ptr<ProcessGroupHbm> group_of(const std::string& name) {
  const auto backend = c10d::resolve_process_group(name)->getBackend(c10::kCPU);
  auto group = c10::dynamic_intrusive_pointer_cast<ProcessGroupHbm>(backend);
  if (group) return group;
  throw Error(ErrorKind::kUnsupported,
              "rendezvous: the backend of group \"" + name + "\" for CPU tensors is " +
                  backend->getBackendName() +
                  ", or wrapped by PyTorch (TORCH_DISTRIBUTED_DEBUG=DETAIL); symmetric memory on "
                  "the CPU needs a group of hbm");
}

c10::intrusive_ptr<SymmetricMemory> SymmetricMemoryAllocatorHbm::meet(
    void* ptr, const std::optional<std::string>& group_name) {
  std::unique_lock lock(blocks().mutex);
  const Block& found = blocks().at(ptr, "rendezvous");
  const memory::Policy policy = found.segment->policy();
  const size_t bytes = found.bytes, pad = found.pad, pad_bytes = found.pad_bytes;
  const std::optional<std::string> name = group_name ? group_name : found.group;
  if (!name) {
    throw Error(ErrorKind::kInvalid, "rendezvous: name a group, for example dist.group.WORLD");
  }
  c10::intrusive_ptr<SymmetricMemoryHbm> memory;
  if (const auto known = found.memories.find(*name); known != found.memories.end()) {
    memory = known->second;
  }
  lock.unlock();

  const auto group = group_of(*name);
  if (memory && memory->serves(group)) return memory;
  const auto options =
      c10::dynamic_intrusive_pointer_cast<GroupOptions>(group->getBackendOptions());
  if (options->policy != policy) {
    throw Error(ErrorKind::kInvalid,
                std::string("rendezvous: the tensor is in memory of the policy \"") +
                    memory::policy_name(policy) + "\" (HBMCOMM_MEMORY), and group \"" + *name +
                    "\" has the policy \"" + memory::policy_name(options->policy) +
                    "\"; set HBMCOMM_MEMORY=" + memory::policy_name(options->policy) +
                    " on all ranks");
  }
  auto window = c10::static_intrusive_pointer_cast<WindowHbm>(group->new_window(std::nullopt));
  try {
    window->tensor_register(
        at::from_blob(ptr, {static_cast<int64_t>(bytes + pad_bytes)}, at::TensorOptions(at::kByte)),
        /*owning=*/false);
  } catch (...) {
    lock.lock();
    blocks().at(ptr, "rendezvous").exposed = true;
    throw;
  }
  const auto life = std::make_shared<const int>();
  lock.lock();
  blocks().at(ptr, "rendezvous").uses.push_back({window->shared(), life});
  lock.unlock();
  memory = c10::make_intrusive<SymmetricMemoryHbm>(std::move(window), life, bytes, pad);
  auto kept = memory;  // then the memory that it replaces, dropped without the lock
  lock.lock();
  kept.swap(blocks().at(ptr, "rendezvous").memories[*name]);
  lock.unlock();
  return memory;
}

}  // namespace

void register_symmetric_memory() {
  // Never destroyed: tensors may be freed while the process ends.
  static auto& allocator = *new c10::intrusive_ptr<SymmetricMemoryAllocator>(
      c10::make_intrusive<SymmetricMemoryAllocatorHbm>());
  c10d::symmetric_memory::register_availability(kBackendName, allocator);
  if (!c10d::symmetric_memory::has_allocator(c10::kCPU)) {
    c10d::symmetric_memory::register_allocator(c10::kCPU, allocator);
  }
}

}  // namespace hbm::process_group
