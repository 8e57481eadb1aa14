// Allocates memory, writes to it, and reports its nodes: the guest's half of test_placement.py.
//
//   vm_placement POLICY BLOCK_BYTES TOTAL_BYTES SOURCE...
//   vm_placement mode   (prints the mode of HBM)
//
// The program takes blocks from each source until they add up to TOTAL_BYTES or the source refuses
// a block.
#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "guest/pages.h"
#include "memory/heap.h"
#include "memory/policy.h"
#include "memory/pool.h"
#include "memory/segment.h"
#include "memory/staging.h"
#include "memory/topology.h"

namespace hbm::memory {
namespace {

constexpr uint64_t kUnbounded = uint64_t{1} << 40;  // only the nodes' memory is the limit

// Allocates a block, which is never freed: the process ends first.
using Allocate = std::function<void*(size_t bytes)>;

Allocate open_source(const std::string& name, Policy policy) {
  if (name == "heap") {
    return [heap = std::make_shared<Heap>(policy)](size_t bytes) { return heap->allocate(bytes); };
  }
  if (name == "segment") {
    return [segment = process_segment(policy)](size_t bytes) { return segment->allocate(bytes); };
  }
  if (name == "staging") {
    auto held = std::make_shared<std::vector<StagingBuffer>>();
    return [pool = process_staging(policy, kUnbounded), held](size_t bytes) {
      return held->emplace_back(pool->acquire(bytes)).data();
    };
  }
  if (name == "pool") {
    auto held = std::make_shared<std::vector<std::shared_ptr<PoolBlock>>>();
    return [pool = Pool::create({.policy = policy, .capacity = kUnbounded}), held](size_t bytes) {
      return held->emplace_back(pool->allocate(bytes))->base();
    };
  }
  throw Error(ErrorKind::kInvalid, "no source of memory is named " + name);
}

void take(const std::string& source, Policy policy, size_t block_bytes, size_t total_bytes) {
  const Allocate allocate = open_source(source, policy);
  std::vector<hbm::Block> blocks;
  std::string refusal;
  for (size_t done = 0; done < total_bytes; done += block_bytes) {
    try {
      void* const block = allocate(block_bytes);
      std::memset(block, 1, block_bytes);
      blocks.push_back({block, block_bytes});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kExhausted) throw;
      refusal = error.what();
      break;
    }
  }
  report(source, blocks, refusal);
}

}  // namespace
}  // namespace hbm::memory

int main(int argc, char** argv) {
  using namespace hbm::memory;
  if (argc == 2 && std::string(argv[1]) == "mode") {
    std::cout << memory_mode_name(discover().mode) << "\n";
    return 0;
  }
  if (argc < 5) {
    std::cerr << "usage: vm_placement mode\n"
                 "       vm_placement POLICY BLOCK_BYTES TOTAL_BYTES SOURCE...\n";
    return 2;
  }
  for (int i = 4; i < argc; ++i) {
    take(argv[i], parse_policy(argv[1]), std::stoull(argv[2]), std::stoull(argv[3]));
  }
}
