// Finds the memory of this machine, and names the source of each fact.
//
// Threads: every function may be called from any thread. discover() reads the machine again at each
// call, which takes milliseconds: use it for reports and at start-up, not for messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hbm::memory {

struct NodeInfo {
  int id;
  uint64_t total_bytes;
  uint64_t free_bytes;  // free pages and half the file cache: see system_memory.h
  uint64_t room_bytes;  // room_on() of this node: room.h
  bool is_hbm;
  bool has_cpus;
  std::string cpus;  // as in "0-3,8", empty for a node of memory alone
};

enum class MemoryMode {
  kNone,    // no HBM seen
  kFlat,    // HBM has its own nodes
  kCache,   // HBM is a cache in front of DDR, and cannot be allocated
  kHybrid,  // one part of HBM has its own nodes, the other part is a cache
  kOnly,    // all nodes with memory are HBM
};
const char* memory_mode_name(MemoryMode mode) noexcept;

struct Topology {
  bool hbm_available;      // memkind can allocate from HBM
  std::string hbm_source;  // how memkind found HBM ("HMAT", ...), or why it did not
  MemoryMode mode;
  std::string mode_source;
  std::string cluster;           // NUMA nodes with CPUs in each socket, as in "4 (SNC-4)"
  int cpu_node;                  // of the CPU that the calling thread runs on; -1 when unknown
  int cpu_nodes;                 // nodes with CPUs that this process may use
  std::vector<int> closest_hbm;  // HBM nodes closest to cpu_node
  std::vector<NodeInfo> nodes;   // by id
};

// Throws Error(kUnavailable) if hwloc cannot read the machine.
Topology discover();

}  // namespace hbm::memory
