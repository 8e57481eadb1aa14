// The kernel's current figures of memory: its pages, the memory of the machine and its NUMA nodes,
// and the limits of this process.
//
// Threads: every function may be called from any thread. Functions that read the amount of memory
// throw Error(kUnavailable) if the kernel's figures cannot be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hbm::memory {

uint64_t small_page_bytes() noexcept;

// Returns the size of a transparent huge page; the small page's size if the kernel has none.
uint64_t huge_page_bytes();

// Rounds up to whole pages. REQUIRES: `bytes` is at least a page below the largest number.
inline uint64_t whole_pages(uint64_t bytes) noexcept {
  return (bytes + small_page_bytes() - 1) / small_page_bytes() * small_page_bytes();
}

// Returns the largest page of shared memory that is mapped in [base, base + bytes) now. Reads all
// mappings of the process: this takes milliseconds, or more for large mappings.
uint64_t largest_page_bytes(const void* base, size_t bytes);

// A table of "key: n kB": /proc/meminfo, or the table of one NUMA node.
class MemInfo {
 public:
  static MemInfo of_machine();
  static MemInfo of_node(int node);  // empty for an absent node

  // Returns 0 if the table has no such key.
  uint64_t bytes(const std::string& key) const;

 private:
  // Throws Error(kUnavailable) if the file exists and cannot be read.
  explicit MemInfo(const std::string& path);

  std::vector<std::pair<std::string, std::string>> entries_;
};

// Returns the free bytes of a node plus half of its file cache, which the kernel reclaims.
uint64_t free_bytes(const MemInfo& node);

// Returns 0 for an absent node.
uint64_t node_free_bytes(int node);

// Returns all memory of the nodes, used or free.
uint64_t nodes_total(const std::vector<int>& nodes);

// Returns all memory of the machine, used or free.
uint64_t machine_total();

// Returns the bytes that processes may still map, touched or not, under the kernel's setting
// vm.overcommit_memory. Returns the largest number if the setting has no bound.
uint64_t overcommit_room(const MemInfo& machine);

// Returns the soft limit of a resource (RLIMIT_*), in bytes. Returns the largest number if there is
// no limit.
uint64_t soft_limit(int resource) noexcept;

// Returns "; NAME is N", or an empty string if there is no limit.
std::string limit_text(int resource, const char* name);

// Returns the possible reasons why the kernel refused a private mapping of `bytes`, and their
// remedies. Names the limits that are set (ulimit), and the machine's overcommit setting if it is
// exceeded. If neither applies, names the address space and the number of mappings.
std::string bounds_of_mappings(uint64_t bytes);

}  // namespace hbm::memory
