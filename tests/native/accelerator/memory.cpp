#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "streams.h"

namespace late {
namespace {

constexpr size_t kDeviceBytes = size_t{8} << 30;  // of addresses: untouched pages take no memory
constexpr size_t kAlignment = 256;
constexpr int kFreed = 0xDB;

struct Block {
  std::byte* address;
  size_t bytes;
  c10::Stream stream;                // current at the allocation
  std::vector<c10::Stream> users{};  // recorded by record_use()
  std::vector<std::shared_ptr<Moment>> until{};
};

class DeviceMemory {
 public:
  static DeviceMemory& get() {
    static auto* const memory = new DeviceMemory;
    return *memory;
  }

  DeviceMemory() {
    const size_t bytes = kDeviceBytes * kDevices;
    const int file = memfd_create("late", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0, "no memory file");
    tensors_ = map(file, bytes, PROT_NONE);
    streams_ = map(file, bytes, PROT_READ | PROT_WRITE);
    close(file);
    for (int device = 0; device < kDevices; ++device) unused_[device] = start_of(device);
  }

  std::byte* by_stream(const void* address) const {
    return streams_ + (static_cast<const std::byte*>(address) - tensors_);
  }

  int device_of(const void* address) const {
    const auto offset = static_cast<const std::byte*>(address) - tensors_;
    if (offset < 0 || offset >= static_cast<ptrdiff_t>(kDeviceBytes * kDevices)) return -1;
    return static_cast<int>(static_cast<size_t>(offset) / kDeviceBytes);
  }

  std::byte* allocate(size_t bytes, const c10::Stream& stream) {
    bytes = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    const std::lock_guard lock(mutex_);
    recycle();
    auto& free = free_[{stream.device_index(), stream.id(), bytes}];
    std::byte* address = nullptr;
    if (!free.empty()) {
      address = free.back();
      free.pop_back();
    } else {
      address = unused_[stream.device_index()];
      TORCH_CHECK_WITH(OutOfMemoryError, address + bytes <= start_of(stream.device_index() + 1),
                       "out of memory on the test accelerator");
      unused_[stream.device_index()] += bytes;
    }
    blocks_.emplace(address, Block{address, bytes, stream});
    return address;
  }

  void free(std::byte* address) {
    const std::lock_guard lock(mutex_);
    const auto place = blocks_.find(address);
    Block block = std::move(place->second);
    blocks_.erase(place);
    for (const c10::Stream& user : block.users) block.until.push_back(record(user));
    waiting_.push_back(std::move(block));
    recycle();
  }

  void record_use(const void* address, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    const auto place = blocks_.find(static_cast<std::byte*>(const_cast<void*>(address)));
    if (place == blocks_.end() || place->second.stream == stream) return;
    place->second.users.push_back(stream);
  }

 private:
  static std::byte* map(int file, size_t bytes, int protection) {
    void* const at = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "cannot map the memory of the test accelerator");
    return static_cast<std::byte*>(at);
  }

  std::byte* start_of(int device) const {
    return tensors_ + static_cast<size_t>(device) * kDeviceBytes;
  }

  // Makes freed blocks available to allocate(), except those that a recorded stream may still use.
  // A task on the stream of a block's allocation overwrites the block.
  void recycle() {
    const auto used =
        std::stable_partition(waiting_.begin(), waiting_.end(), [](const Block& block) {
          return !std::all_of(block.until.begin(), block.until.end(),
                              [](const auto& moment) { return moment->reached(); });
        });
    for (auto block = used; block != waiting_.end(); ++block) {
      enqueue(block->stream, [at = by_stream(block->address), bytes = block->bytes] {
        std::memset(at, kFreed, bytes);
      });
      free_[{block->stream.device_index(), block->stream.id(), block->bytes}].push_back(
          block->address);
    }
    waiting_.erase(used, waiting_.end());
  }

  using Shelf = std::tuple<int, c10::StreamId, size_t>;

  std::byte* tensors_ = nullptr;
  std::byte* streams_ = nullptr;
  std::mutex mutex_;  // guards the members below
  std::byte* unused_[kDevices] = {};
  std::map<Shelf, std::vector<std::byte*>> free_;
  std::map<std::byte*, Block> blocks_;
  std::vector<Block> waiting_;
};

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kPrivateUse1, current_device());
    void* const at =
        bytes == 0 ? nullptr : DeviceMemory::get().allocate(bytes, current_stream(device));
    return {at, at, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    enqueue(current_stream(c10::Device(c10::kPrivateUse1, current_device())),
            [to = by_stream(to), from = by_stream(from), bytes] { std::memcpy(to, from, bytes); });
  }

 private:
  static void release(void* address) {
    if (address != nullptr) DeviceMemory::get().free(static_cast<std::byte*>(address));
  }
};

class PinnedMemory {
 public:
  static PinnedMemory& get() {
    static auto* const memory = new PinnedMemory;
    return *memory;
  }

  void* allocate(size_t bytes) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!fails_, "no more memory can be pinned");
    void* const block = ::operator new(std::max<size_t>(bytes, 1), std::align_val_t{64});
    blocks_.emplace(static_cast<std::byte*>(block), bytes);
    ++under_[current_device()];
    ++counts_.in_use;
    ++counts_.allocated;
    return block;
  }

  void free(void* block) {
    const std::lock_guard lock(mutex_);
    const auto place = blocks_.find(static_cast<std::byte*>(block));
    --counts_.in_use;
    if (in_copy(place->first, place->second)) {
      ++counts_.freed_in_copy;
      return;
    }
    blocks_.erase(place);
    ::operator delete(block, std::align_val_t{64});
  }

  void begin_use(const void* address, size_t bytes, bool writes) {
    const std::lock_guard lock(mutex_);
    const Copy copy{static_cast<const std::byte*>(address), bytes, writes};
    const bool reused = std::any_of(copies_.begin(), copies_.end(), [&copy](const Copy& earlier) {
      return earlier.overlaps(copy.address, copy.bytes) && (earlier.writes || copy.writes);
    });
    if (reused && pinned(copy.address)) ++counts_.reused_in_copy;
    copies_.push_back(copy);
  }

  void end_use(const void* address, size_t bytes) {
    const std::lock_guard lock(mutex_);
    copies_.erase(std::find_if(copies_.begin(), copies_.end(), [&](const Copy& copy) {
      return copy.address == address && copy.bytes == bytes;
    }));
  }

  bool add(void* block, size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (fails_ || pinned(static_cast<std::byte*>(block))) return false;
    registered_.emplace(static_cast<std::byte*>(block), bytes);
    ++under_[current_device()];
    ++counts_.registered;
    return true;
  }

  bool remove(void* block) {
    const std::lock_guard lock(mutex_);
    const auto place = registered_.find(static_cast<std::byte*>(block));
    if (place == registered_.end()) return false;
    if (in_copy(place->first, place->second)) ++counts_.freed_in_copy;
    registered_.erase(place);
    --counts_.registered;
    return true;
  }

  bool contains(const void* address) {
    const std::lock_guard lock(mutex_);
    return pinned(static_cast<const std::byte*>(address));
  }

  PinnedCounts counts() {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

  int64_t under(int device) {
    const std::lock_guard lock(mutex_);
    return under_[device];
  }

  void fail(bool fails) {
    const std::lock_guard lock(mutex_);
    fails_ = fails;
  }

 private:
  struct Copy {
    const std::byte* address;
    size_t bytes;
    bool writes;

    bool overlaps(const std::byte* other, size_t length) const {
      return address < other + length && other < address + bytes;
    }
  };
  using Blocks = std::map<std::byte*, size_t>;

  bool in_copy(const std::byte* address, size_t bytes) const {
    return std::any_of(copies_.begin(), copies_.end(),
                       [&](const Copy& copy) { return copy.overlaps(address, bytes); });
  }

  bool pinned(const std::byte* address) const {
    const auto in = [address](const Blocks& blocks) {
      return std::any_of(blocks.begin(), blocks.end(), [address](const auto& block) {
        return block.first <= address && address < block.first + block.second;
      });
    };
    return in(blocks_) || in(registered_);
  }

  std::mutex mutex_;  // guards the members below
  Blocks blocks_;
  Blocks registered_;
  std::vector<Copy> copies_;
  PinnedCounts counts_;
  int64_t under_[kDevices] = {};
  bool fails_ = false;
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const block = PinnedMemory::get().allocate(bytes);
    return {block, block, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* block) { PinnedMemory::get().free(block); }
};

}  // namespace

std::byte* by_stream(const void* device_address) {
  return DeviceMemory::get().by_stream(device_address);
}
int device_of(const void* address) { return DeviceMemory::get().device_of(address); }

c10::Allocator* device_allocator() {
  static auto* const allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return allocator;
}

void record_use(const void* device_address, const c10::Stream& stream) {
  DeviceMemory::get().record_use(device_address, stream);
}

void begin_use_of_host(const void* address, size_t bytes, bool writes) {
  PinnedMemory::get().begin_use(address, bytes, writes);
}
void end_use_of_host(const void* address, size_t bytes) {
  PinnedMemory::get().end_use(address, bytes);
}
bool is_pinned(const void* address) { return PinnedMemory::get().contains(address); }
PinnedCounts pinned_counts() { return PinnedMemory::get().counts(); }
int64_t pinned_under(int device) { return PinnedMemory::get().under(device); }
void fail_pinned(bool fails) { PinnedMemory::get().fail(fails); }

int lateHostRegister(void* block, size_t bytes, unsigned) {
  return PinnedMemory::get().add(block, bytes) ? 0 : 1;
}
int lateHostUnregister(void* block) { return PinnedMemory::get().remove(block) ? 0 : 1; }

}  // namespace late
