#include "box/server/storage/segment.h"

#include <unistd.h>

#include <cstring>

#include "base/log.h"

namespace hbm::box::server::storage {
namespace {

void add(std::atomic<uint64_t>& count, uint64_t amount) noexcept {
  count.fetch_add(amount, std::memory_order_relaxed);
}

uint64_t get(const std::atomic<uint64_t>& count) noexcept {
  return count.load(std::memory_order_relaxed);
}

}  // namespace

void Counters::count(protocol::Opcode opcode, uint64_t bytes) noexcept {
  switch (opcode) {
    case protocol::Opcode::kRead:
      add(reads_, 1);
      return add(read_bytes_, bytes);
    case protocol::Opcode::kWrite:
      add(writes_, 1);
      return add(written_bytes_, bytes);
    case protocol::Opcode::kAccumulate:
      add(accumulates_, 1);
      return add(accumulated_bytes_, bytes);
    case protocol::Opcode::kFetchAdd:
      return add(fetch_adds_, 1);
    default:
      return;
  }
}

protocol::Counts Counters::counts() const noexcept {
  return {.reads = get(reads_),
          .read_bytes = get(read_bytes_),
          .writes = get(writes_),
          .written_bytes = get(written_bytes_),
          .accumulates = get(accumulates_),
          .accumulated_bytes = get(accumulated_bytes_),
          .fetch_adds = get(fetch_adds_)};
}

StoredSegment::~StoredSegment() {
  if (!remove_.load(std::memory_order_relaxed) || unlink(path.c_str()) == 0) return;
  const char* cause = std::strerror(errno);
  log::warn("cannot remove " + path + ", which is not in use any more: " + cause);
}

}  // namespace hbm::box::server::storage
