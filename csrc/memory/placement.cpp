#include "memory/placement.h"

#include <numaif.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace hbm::memory {
namespace {

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
struct Batch {
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

std::map<int, uint64_t> where(const void* address, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = begin + bytes;
  std::map<int, uint64_t> sums;
  Batch batch;
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
