// The memory that this machine has, and how each fact was found.
//
// Threads: every function may be called from any thread. discover() reads the machine anew at each
// call and takes milliseconds: it is for reports and start-up, not for the path of a message.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hbm::memory {

struct NodeInfo {
  int id;
  uint64_t total_bytes;
  uint64_t free_bytes;  // free pages and half the file cache: see system_memory.h
  bool is_hbm;
  bool has_cpus;
  std::string cpus;  // as in "0-3,8", empty for a node of memory alone
};

enum class MemoryMode {
  kNone,    // no HBM seen
  kFlat,    // HBM is nodes of its own
  kCache,   // HBM is a cache in front of DDR: nothing to allocate, all memory profits
  kHybrid,  // part of it nodes, part of it cache
};
const char* memory_mode_name(MemoryMode mode) noexcept;

struct Topology {
  bool hbm_available;      // memkind can allocate from HBM
  std::string hbm_source;  // how memkind found it ("HMAT", ...), or its reason when it did not
  MemoryMode mode;
  std::string mode_source;
  std::string cluster;           // CPU nodes a socket, as in "4 (SNC-4)"
  int cpu_node;                  // of the CPU that the calling thread runs on; -1 when unknown
  std::vector<int> closest_hbm;  // HBM nodes closest to cpu_node
  std::vector<NodeInfo> nodes;   // by id
};

// Throws Error(kUnavailable) when hwloc cannot read the machine.
Topology discover();

}  // namespace hbm::memory
