#include "memory/speed.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <string>

#include "base/error.h"
#include "memory/placement.h"
#include "memory/policy.h"
#include "memory/room.h"

namespace hbm::memory {
namespace {

constexpr size_t kLine = 64;  // bytes; a larger cache line makes some loads hits
constexpr size_t kMostLoads = 4 << 20;

// The lines of a block. Each has a number, and later an address.
class Lines {
 public:
  Lines(void* block, size_t bytes) : first_(static_cast<char*>(block)), count_(bytes / kLine) {}

  size_t count() const { return count_; }
  char* at(size_t line) const { return first_ + line * kLine; }
  size_t number(size_t line) const {
    size_t number = 0;
    std::memcpy(&number, at(line), sizeof number);
    return number;
  }
  void set_number(size_t line, size_t number) const {
    std::memcpy(at(line), &number, sizeof number);
  }
  void set_address(size_t line, const char* address) const {
    std::memcpy(at(line), &address, sizeof address);
  }

 private:
  char* const first_;
  const size_t count_;
};

}  // namespace

std::shared_ptr<void> block_on_node(int node, size_t bytes) {
  const uint64_t room = std::min(room_on({node}, false), machine_room());
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
  const Lines lines(block, bytes);
  for (size_t i = 0; i < lines.count(); ++i) lines.set_number(i, i);
  // Sattolo's shuffle, in place: the permutation is a single cycle.
  std::mt19937_64 random(lines.count());
  for (size_t i = lines.count() - 1; i > 0; --i) {
    const size_t other = random() % i;
    const size_t number = lines.number(i);
    lines.set_number(i, lines.number(other));
    lines.set_number(other, number);
  }
  for (size_t i = 0; i < lines.count(); ++i) lines.set_address(i, lines.at(lines.number(i)));

  const size_t loads = std::min(lines.count(), kMostLoads);
  const auto begin = std::chrono::steady_clock::now();
  const char* at = lines.at(0);
  for (size_t i = 0; i < loads; ++i) std::memcpy(&at, at, sizeof at);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  // The compiler may drop neither the loads nor the chain.
  asm volatile("" : : "r"(at) : "memory");
  return took.count() / static_cast<double>(loads);
}

}  // namespace hbm::memory
