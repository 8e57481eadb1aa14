// The kernel's figures of memory at the moment: its pages, what the machine and its NUMA nodes
// have, and the limits of this process.
//
// Threads: every function may be called from any thread. Those that read how much memory there is
// throw Error(kUnavailable) when the kernel's figures cannot be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hbm::memory {

uint64_t small_page_bytes() noexcept;

// The size of a transparent huge page; the small page's when the kernel has none.
uint64_t huge_page_bytes();

// REQUIRES: bytes is at least a page below the largest number.
inline uint64_t whole_pages(uint64_t bytes) noexcept {
  return (bytes + small_page_bytes() - 1) / small_page_bytes() * small_page_bytes();
}

// The largest page of shared memory that is mapped in [base, base + bytes), as the kernel says now.
// It looks through all mappings of the process: milliseconds, or more where they are large.
uint64_t largest_page_bytes(const void* base, size_t bytes);

// A table of "key: n kB": /proc/meminfo, or a NUMA node's own.
class MemInfo {
 public:
  static MemInfo of_machine();
  static MemInfo of_node(int node);  // empty for a node that does not exist

  // 0 when the table has no such key.
  uint64_t bytes(const std::string& key) const;

 private:
  // Throws Error(kUnavailable) when the file is there and cannot be read.
  explicit MemInfo(const std::string& path);

  std::vector<std::pair<std::string, std::string>> entries_;
};

// Free pages of a node plus half of its file cache, which the kernel gives up when asked.
uint64_t free_bytes(const MemInfo& node);

// 0 for a node that does not exist.
uint64_t node_free_bytes(int node);

// All memory of the nodes, whatever is in use.
uint64_t nodes_total(const std::vector<int>& nodes);

// All memory of the machine, whatever is in use.
uint64_t machine_total();

// The most that the kernel lets processes map further, whether they touch it or not: its setting
// vm.overcommit_memory. The largest number when that sets no bound.
uint64_t overcommit_room(const MemInfo& machine);

// RLIMIT_*, in bytes; the largest number when there is none.
uint64_t soft_limit(int resource) noexcept;

// "; NAME is N", or nothing when there is no limit.
std::string limit_text(int resource, const char* name);

// Tells why the kernel may have refused a private mapping of so many bytes, and what to
// do: the limits that are set (ulimit), the machine's overcommit; else the address space and the
// number of mappings.
std::string bounds_of_mappings(uint64_t bytes);

}  // namespace hbm::memory
