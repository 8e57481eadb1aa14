#include "memory/placement.h"

#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace hbm::memory {
namespace {

int kernel_mode(Policy policy, size_t nodes) {
  if (policy == Policy::kBind) return MPOL_BIND;
  if (policy == Policy::kInterleave) return MPOL_INTERLEAVE;
  return nodes > 1 ? MPOL_PREFERRED_MANY : MPOL_PREFERRED;
}

constexpr size_t kBatch = 1024;  // pages a system call

[[noreturn]] void refuse(int error) {
  throw Error(ErrorKind::kUnavailable, std::string("move_pages cannot tell where memory lies: ") +
                                           std::strerror(error) +
                                           "; a container needs the capability SYS_NICE for it");
}

// ENOENT: never touched. EFAULT: not mapped, or the kernel's shared page of zeros.
bool is_absent(int status) noexcept { return status == -ENOENT || status == -EFAULT; }

const uintptr_t kPage = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));

// A run of pages, and what move_pages says of each: its node, or a negative error number.
struct PageBatch {
  uintptr_t first;
  size_t count;
  std::array<int, kBatch> nodes;

  uintptr_t page(size_t i) const noexcept { return first + i * kPage; }

  void ask() {
    std::array<void*, kBatch> pages;
    for (size_t i = 0; i < count; ++i) pages[i] = reinterpret_cast<void*>(page(i));
    if (move_pages(0, count, pages.data(), nullptr, nodes.data(), 0) != 0) refuse(errno);
  }

  // Some kernels (6.1 among them) call a page absent while automatic NUMA balancing samples it, and
  // all do when only another process touched it. A read ends that; a page that is nowhere is not
  // read, since that could bring it into being. True when there was any such page.
  bool map_resident_pages() noexcept {
    if (std::none_of(nodes.begin(), nodes.begin() + count, is_absent)) return false;
    std::array<unsigned char, kBatch> resident;
    if (mincore(reinterpret_cast<void*>(first), count * kPage, resident.data()) != 0) return false;
    bool any = false;
    for (size_t i = 0; i < count; ++i) {
      if (!is_absent(nodes[i]) || (resident[i] & 1) == 0) continue;
      static_cast<void>(*reinterpret_cast<const volatile char*>(page(i)));
      any = true;
    }
    return any;
  }
};

}  // namespace

void place_on(const std::vector<int>& nodes, Policy policy, void* base, size_t bytes) {
  if (nodes.empty()) return;
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, NUMA_NUM_NODES / kBits> mask{};
  for (int node : nodes) mask[node / kBits] |= 1UL << (node % kBits);
  if (mbind(base, bytes, kernel_mode(policy, nodes.size()), mask.data(), NUMA_NUM_NODES, 0) == 0) {
    return;
  }
  const int error = errno;
  throw PlacingError(std::string("cannot place memory under memory policy \"") +
                     policy_name(policy) + "\": mbind: " + std::strerror(error) +
                     (error == EPERM ? "; a container needs the capability SYS_NICE for it" : ""));
}

std::vector<int> block_nodes(const void* block) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, NUMA_NUM_NODES / kBits> mask{};
  int mode = 0;
  if (get_mempolicy(&mode, mask.data(), NUMA_NUM_NODES, const_cast<void*>(block), MPOL_F_ADDR) !=
      0) {
    throw Error(ErrorKind::kUnavailable,
                std::string("get_mempolicy cannot tell which NUMA nodes a block comes from: ") +
                    std::strerror(errno) + "; a container needs the capability SYS_NICE for it");
  }
  std::vector<int> nodes;
  for (size_t node = 0; node < NUMA_NUM_NODES; ++node) {
    if ((mask[node / kBits] >> (node % kBits)) & 1) nodes.push_back(static_cast<int>(node));
  }
  return nodes;
}

std::map<int, uint64_t> where(const void* address, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = begin + bytes;
  std::map<int, uint64_t> sums;
  PageBatch batch;
  for (uintptr_t next = begin - begin % kPage; next < end; next += batch.count * kPage) {
    batch.first = next;
    batch.count = std::min<size_t>(kBatch, (end - next + kPage - 1) / kPage);
    batch.ask();
    if (batch.map_resident_pages()) batch.ask();
    for (size_t i = 0; i < batch.count; ++i) {
      const int node = batch.nodes[i];
      if (is_absent(node)) continue;
      if (node < 0) refuse(-node);
      sums[node] += std::min(batch.page(i) + kPage, end) - std::max(batch.page(i), begin);
    }
  }
  return sums;
}

}  // namespace hbm::memory
