#include "memory/pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "memory/block.h"
#include "memory/placement.h"
#include "memory/room.h"
#include "memory/shared_memory.h"
#include "memory/system_memory.h"
#include "memory/tuning.h"

namespace hbm::memory {
namespace {

std::string bytes_text(uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

PoolOptions checked(PoolOptions options) {
  const uint64_t page = small_page_bytes();
  if (options.capacity < page || options.capacity > kLargestPoolCapacityBytes) {
    throw Error(ErrorKind::kInvalid, "a pool's capacity is " + bytes_text(options.capacity) +
                                         "; it must be between a page (" + std::to_string(page) +
                                         ") and " + std::to_string(kLargestPoolCapacityBytes));
  }
  if (!std::has_single_bit(options.smallest_block) || !std::has_single_bit(options.largest_block) ||
      options.smallest_block > options.largest_block || options.largest_block < page) {
    throw Error(ErrorKind::kInvalid,
                "a pool's blocks are " + std::to_string(options.smallest_block) + " to " +
                    bytes_text(options.largest_block) +
                    "; both must be powers of two, the smallest not past the largest, and the "
                    "largest at least a page (" +
                    std::to_string(page) + ")");
  }
  options.smallest_block = std::max(options.smallest_block, page);
  return options;
}

uint64_t space_of(const PoolOptions& options) {
  const uint64_t largest = std::min(options.largest_block, std::bit_ceil(options.capacity));
  return (kPoolAddressesPerCapacity * options.capacity + largest - 1) / largest * largest;
}

// Reserves addresses that begin at a multiple of a huge page.
std::byte* reserve(uint64_t space) {
  const uint64_t alignment = huge_page_bytes();
  void* const all = mmap(nullptr, space + alignment, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) {
    throw Error(ErrorKind::kExhausted,
                "cannot reserve " + bytes_text(space) +
                    " of addresses for a pool: mmap: " + std::strerror(errno) +
                    "; ask for less capacity, or raise the limit of address space (ulimit -v)");
  }
  auto* const begin = static_cast<std::byte*>(all);
  const uint64_t before = -reinterpret_cast<uintptr_t>(all) % alignment;
  if (before != 0) munmap(begin, before);
  munmap(begin + before + space, alignment - before);
  return begin + before;
}

void map_at(std::byte* base, uint64_t size, const Descriptor& file) {
  if (mmap(base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), 0) ==
      MAP_FAILED) {
    throw Error(ErrorKind::kUnavailable,
                "cannot map " + bytes_text(size) + " into a pool: mmap: " + std::strerror(errno) +
                    (errno == ENOMEM ? "; raise the limit of mappings (vm.max_map_count)" : ""));
  }
  if (madvise(base, size, MADV_DONTFORK) != 0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("cannot keep a pool's block from forked children: madvise: ") +
                    std::strerror(errno));
  }
  madvise(base, size, MADV_HUGEPAGE);  // a hint: largest_page_bytes() shows the result
}

void require_bytes(const Descriptor& file, uint64_t bytes) {
  struct stat found{};
  if (fstat(file.get(), &found) != 0) {
    throw Error(ErrorKind::kInvalid,
                std::string("cannot map a file into a pool: fstat: ") + std::strerror(errno));
  }
  if (!S_ISREG(found.st_mode) || static_cast<uint64_t>(found.st_size) < bytes) {
    throw Error(ErrorKind::kInvalid, "cannot map " + bytes_text(bytes) +
                                         " of a file into a pool: it is no regular file, or has " +
                                         std::to_string(found.st_size));
  }
}

void require_unplaced(Policy policy) {
  if (policy == Policy::kDdr) return;
  if (policy != Policy::kPreferred) {
    throw Error(ErrorKind::kUnsupported,
                std::string("memory policy \"") + policy_name(policy) +
                    "\" cannot place a file, because its file system does; use "
                    "\"preferred\" or \"ddr\" for a pool in files");
  }
  static std::atomic<bool> said{false};
  if (!said.exchange(true, std::memory_order_relaxed)) {
    log::info(
        "memory policy \"preferred\" cannot place files: file systems place blocks that "
        "are stored in files");
  }
}

}  // namespace

PoolBlock::PoolBlock(std::shared_ptr<Pool> pool, Descriptor file, uint64_t size, bool ours)
    : pool_(std::move(pool)), file_(std::move(file)), size_(size), ours_(ours) {}

PoolBlock::~PoolBlock() {
  if (base_ != nullptr && !pool_->fork_.in_child()) pool_->release(*this);
}

Descriptor PoolBlock::read_only() const {
  const std::string path = "/proc/self/fd/" + std::to_string(fd());
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) {
    throw Error(ErrorKind::kUnavailable,
                "cannot open a block for reading alone: " + path + ": " + std::strerror(errno));
  }
  return file;
}

std::shared_ptr<Pool> Pool::create(const PoolOptions& options) {
  return std::shared_ptr<Pool>(new Pool(checked(options)));
}

Pool::Pool(const PoolOptions& options)
    : options_(options),
      nodes_(hbm_nodes(options.policy)),
      space_(space_of(options)),
      base_(reserve(space_)),
      buddy_(space_, options.smallest_block, options.largest_block) {}

Pool::~Pool() {
  // A forked child does not have the blocks, and may have mapped other memory at their addresses.
  if (!fork_.in_child()) munmap(base_, space_);
}

std::shared_ptr<PoolBlock> Pool::allocate(uint64_t bytes) {
  fork_.require_owner("allocate from its parent's pool");
  return make_block(make_shared_file(std::string("hbmcomm-box-") + policy_name(options_.policy)),
                    bytes,
                    /*ours=*/true);
}

std::shared_ptr<PoolBlock> Pool::map(Descriptor file, uint64_t bytes) {
  fork_.require_owner("map into its parent's pool");
  require_unplaced(options_.policy);
  require_bytes(file, bytes);
  return make_block(std::move(file), bytes, /*ours=*/false);
}

std::shared_ptr<PoolBlock> Pool::make_block(Descriptor file, uint64_t bytes, bool ours) {
  if (bytes == 0) throw Error(ErrorKind::kInvalid, "a block of a pool needs at least one byte");
  if (bytes > options_.largest_block) {
    throw Error(ErrorKind::kExhausted, cannot_allocate(bytes, options_.policy) +
                                           ": the pool's largest block is " +
                                           bytes_text(options_.largest_block));
  }
  const uint64_t size = whole_pages(bytes);
  std::shared_ptr<PoolBlock> block(new PoolBlock(shared_from_this(), std::move(file), size, ours));
  block->base_ = take_addresses(size);
  if (ours) {
    set_size(block->file_, size);
    fix_size(block->file_);
  }
  map_at(block->base_, size, block->file_);
  if (ours) {
    place_on(nodes_, options_.policy, block->base_, size);
    take_room(block->base_, size, options_.policy, nodes_);
  }
  return block;
}

std::byte* Pool::take_addresses(uint64_t size) {
  const std::lock_guard lock(mutex_);
  if (size > options_.capacity - used_) {
    throw Error(ErrorKind::kExhausted, cannot_allocate(size, options_.policy) +
                                           ": the pool holds " + bytes_text(options_.capacity) +
                                           ", of which " + std::to_string(used_) + " are in use");
  }
  const auto offset = buddy_.allocate(size);
  if (!offset) {
    throw Error(ErrorKind::kExhausted, cannot_allocate(size, options_.policy) +
                                           ": the pool's free addresses are in ranges of at most " +
                                           bytes_text(buddy_.largest_free_bytes()));
  }
  used_ += size;
  ++blocks_;
  return base_ + *offset;
}

void Pool::release(const PoolBlock& block) noexcept {
  if (block.ours_ && fallocate(block.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                               static_cast<off_t>(block.size())) != 0) {
    log::error(std::string("a pool cannot give memory back to the kernel: fallocate: ") +
               std::strerror(errno));
  }
  if (mmap(block.base(), block.size(), PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    log::error(std::string("a pool cannot use the addresses of a block again: mmap: ") +
               std::strerror(errno));
    return;
  }
  const std::lock_guard lock(mutex_);
  buddy_.free(static_cast<uint64_t>(block.base() - base_));
  used_ -= block.size();
  --blocks_;
}

PoolStats Pool::stats() const {
  fork_.require_owner("ask for its parent's pool");
  const std::lock_guard lock(mutex_);
  const uint64_t room = (options_.capacity - used_) / small_page_bytes() * small_page_bytes();
  return {.capacity = options_.capacity,
          .used = used_,
          .blocks = blocks_,
          .largest_free = std::min(room, buddy_.largest_free_bytes()),
          .fragmentation = buddy_.fragmentation()};
}

}  // namespace hbm::memory
