#include "memory/placement.h"

#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "memory/numa_maps.h"
#include "memory/tuning.h"

namespace hbm::memory {
namespace {

// libnuma has these three functions too, but loading libnuma takes time, because it reads the
// machine's topology.
constexpr unsigned long kMaskBits = NUMA_NUM_NODES;

int bind_range(void* base, size_t bytes, int mode, const unsigned long* mask) {
  return static_cast<int>(syscall(SYS_mbind, base, bytes, mode, mask, kMaskBits, 0UL));
}

int policy_of(const void* block, int* mode, unsigned long* mask) {
  return static_cast<int>(syscall(SYS_get_mempolicy, mode, mask, kMaskBits, block,
                                  static_cast<unsigned long>(MPOL_F_ADDR)));
}

int nodes_of(size_t count, void* const* pages, int* nodes) {
  return static_cast<int>(syscall(SYS_move_pages, 0, count, pages, nullptr, nodes, 0));
}

int kernel_mode(Policy policy, size_t nodes) {
  if (policy == Policy::kBind) return MPOL_BIND;
  if (policy == Policy::kInterleave) return MPOL_INTERLEAVE;
  return nodes > 1 ? MPOL_PREFERRED_MANY : MPOL_PREFERRED;
}

[[noreturn]] void refuse(int error, const std::string& more = "") {
  throw Error(
      ErrorKind::kUnavailable,
      std::string("move_pages cannot find the location of memory: ") + std::strerror(error) + more);
}

// ENOENT: an untouched page. EFAULT: an unmapped page, or the kernel's shared page of zeros.
bool is_absent(int status) noexcept { return status == -ENOENT || status == -EFAULT; }

const uintptr_t kPage = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));

// A run of pages, and the result of move_pages for each: its node, or a negative error number.
struct PageBatch {
  uintptr_t first;
  size_t count;
  std::array<int, kPagesPerQuery> nodes;

  uintptr_t page(size_t i) const noexcept { return first + i * kPage; }

  // Queries the nodes. Returns 0, or the errno.
  int ask() {
    std::array<void*, kPagesPerQuery> pages;
    for (size_t i = 0; i < count; ++i) pages[i] = reinterpret_cast<void*>(page(i));
    return nodes_of(count, pages.data(), nodes.data()) == 0 ? 0 : errno;
  }

  // Reads each page that was reported as absent but has memory. Some kernels (6.1 among them)
  // report a page as absent while automatic NUMA balancing samples it. All kernels report a page as
  // absent if only another process touched it. Once this process has read the page, they report its
  // node. A page without memory is not read, because reading could allocate it. Returns true if it
  // has read any page.
  bool map_resident_pages() noexcept {
    if (std::none_of(nodes.begin(), nodes.begin() + count, is_absent)) return false;
    std::array<unsigned char, kPagesPerQuery> resident;
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

// Returns the bytes of [begin, end) in resident pages, as reported by mincore(). Reads each such
// page, so that the tables of this process include it.
uint64_t resident_bytes(uintptr_t begin, uintptr_t end) {
  uint64_t sum = 0;
  std::array<unsigned char, kPagesPerQuery> resident;
  for (uintptr_t next = begin - begin % kPage; next < end; next += kPagesPerQuery * kPage) {
    const size_t count = std::min<size_t>(kPagesPerQuery, (end - next + kPage - 1) / kPage);
    if (mincore(reinterpret_cast<void*>(next), count * kPage, resident.data()) != 0) {
      throw Error(
          ErrorKind::kUnavailable,
          std::string("mincore cannot tell which pages there are: ") + std::strerror(errno));
    }
    for (size_t i = 0; i < count; ++i) {
      if ((resident[i] & 1) == 0) continue;
      const uintptr_t page = next + i * kPage;
      static_cast<void>(*reinterpret_cast<const volatile char*>(page));
      sum += std::min(page + kPage, end) - std::max(page, begin);
    }
  }
  return sum;
}

// Implements where() for a process that may not call move_pages(). `refusal` is the error number of
// that call.
std::map<int, uint64_t> where_by_mappings(uintptr_t begin, uintptr_t end, int refusal) {
  try {
    static_cast<void>(resident_bytes(begin, end));
    return bytes_on_nodes(mappings_over(begin, end), begin, end, resident_bytes);
  } catch (const Error& error) {
    refuse(refusal, std::string("; nor can the tables of mappings: ") + error.what() +
                        ". Let the container call move_pages (its seccomp profile, as with "
                        "--security-opt seccomp=FILE; Docker's own with --cap-add SYS_NICE)");
  }
}

}  // namespace

void place_on(const std::vector<int>& nodes, Policy policy, void* base, size_t bytes) {
  if (nodes.empty()) return;
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, NUMA_NUM_NODES / kBits> mask{};
  for (int node : nodes) mask[node / kBits] |= 1UL << (node % kBits);
  if (bind_range(base, bytes, kernel_mode(policy, nodes.size()), mask.data()) == 0) return;
  const int error = errno;
  throw PlacingError(std::string("cannot place memory under memory policy \"") +
                     policy_name(policy) + "\": mbind: " + std::strerror(error) +
                     (error == EPERM ? "; a container needs the capability SYS_NICE for it" : ""));
}

std::vector<int> block_nodes(const void* block) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, NUMA_NUM_NODES / kBits> mask{};
  int mode = 0;
  if (policy_of(block, &mode, mask.data()) != 0) {
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
    batch.count = std::min<size_t>(kPagesPerQuery, (end - next + kPage - 1) / kPage);
    int refusal = batch.ask();
    if (refusal == 0 && batch.map_resident_pages()) refusal = batch.ask();
    if (refusal == EPERM || refusal == EACCES || refusal == ENOSYS) {
      return where_by_mappings(begin, end, refusal);
    }
    if (refusal != 0) refuse(refusal);
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
