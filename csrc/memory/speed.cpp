#include "memory/speed.h"

#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/placement.h"
#include "memory/policy.h"
#include "memory/room.h"

namespace hbm::memory {
namespace {

constexpr size_t kLine = 64;  // bytes; a larger cache line makes some loads hits
constexpr size_t kLoads = 2'000'000;

}  // namespace

std::shared_ptr<void> block_on_node(int node, size_t bytes) {
  const uint64_t room = room_on({node}, false);
  if (bytes > room) {
    throw Error(ErrorKind::kExhausted, "cannot take " + std::to_string(bytes) +
                                           " bytes on NUMA node " + std::to_string(node) + ": " +
                                           std::to_string(room) + " bytes fit");
  }
  void* const block =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) {
    throw Error(ErrorKind::kExhausted, std::string("cannot map memory: ") + std::strerror(errno));
  }
  std::shared_ptr<void> owner(block, [bytes](void* mapped) { munmap(mapped, bytes); });
  madvise(block, bytes, MADV_HUGEPAGE);
  place_on({node}, Policy::kBind, block, bytes);
  std::memset(block, 0, bytes);
  return owner;
}

double load_seconds(void* block, size_t bytes) {
  const size_t lines = bytes / kLine;
  std::vector<size_t> order(lines);
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937_64 random(lines);
  // Sattolo's shuffle: the permutation is a single cycle.
  for (size_t i = lines - 1; i > 0; --i) std::swap(order[i], order[random() % i]);
  char* const first = static_cast<char*>(block);
  for (size_t i = 0; i < lines; ++i) {
    char* const next = first + order[i] * kLine;
    std::memcpy(first + i * kLine, &next, sizeof next);
  }
  const auto begin = std::chrono::steady_clock::now();
  const char* at = first;
  for (size_t i = 0; i < kLoads; ++i) std::memcpy(&at, at, sizeof at);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  // The compiler may drop neither the loads nor the chain.
  asm volatile("" : : "r"(at) : "memory");
  return took.count() / static_cast<double>(kLoads);
}

}  // namespace hbm::memory
