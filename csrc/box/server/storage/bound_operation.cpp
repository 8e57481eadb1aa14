#include "box/server/storage/bound_operation.h"

#include <atomic>
#include <cstring>
#include <mutex>

#include "kernels/accumulate.h"

namespace hbm::box::server::storage {
namespace {

void add_to_cell(std::byte* at, int64_t addend) {
  const std::atomic_ref<uint64_t> cell(*reinterpret_cast<uint64_t*>(at));
  cell.fetch_add(static_cast<uint64_t>(addend), std::memory_order_acq_rel);
}

void apply(const BoundOperation& operation, const Steps::Bounds& range) {
  const BoxOperation& what = operation.what;
  std::byte* const target = operation.target + range.first;
  if (what.opcode == protocol::Opcode::kFetchAdd) return add_to_cell(target, what.addend);
  const size_t count = (range.last - range.first) / element_size(what.formula.target);
  const uint64_t before = what.formula.source_bytes(range.first - what.target.offset);
  kernels::accumulate(target, operation.source + what.source.offset + before, count, what.formula);
}

void apply_undoably(const BoundOperation& operation, const Steps::Bounds& range,
                    CheckedNumber& progress, std::byte* undo) {
  const uint64_t bytes = range.last - range.first;
  const uint64_t before = progress.load(std::memory_order_relaxed);
  std::memcpy(undo, operation.target + range.first, bytes);
  if (operation.sync) persist(undo, bytes);
  progress.exchange(before + 1, std::memory_order_acq_rel);
  if (operation.sync) persist(&progress, sizeof progress);
  apply(operation, range);
  if (operation.sync) persist(operation.target + range.first, bytes);
  progress.store(before + 2, std::memory_order_release);
  if (operation.sync) persist(&progress, sizeof progress);
}

}  // namespace

void run_part(const BoundOperation& operation, uint32_t part, const Recorded& recorded,
              Stripes& stripes) {
  const Steps steps = operation.steps();
  const Steps::Bounds all = steps.steps_of(part, operation.what.parts);
  uint64_t step = all.first;
  if (recorded) step += recorded.parts[part].progress.load(std::memory_order_acquire) / 2;
  for (; step < all.last; ++step) {
    const std::lock_guard lock(stripes.of(operation.target, steps.chunk_of(step)));
    if (recorded) {
      apply_undoably(operation, steps.bytes_of(step), recorded.parts[part].progress,
                     recorded.undo + uint64_t{part} * operation.chunk);
    } else {
      apply(operation, steps.bytes_of(step));
    }
  }
}

void roll_back(const BoundOperation& operation, const Recorded& recorded) {
  const Steps steps = operation.steps();
  for (uint32_t part = 0; part < operation.what.parts; ++part) {
    CheckedNumber& progress = recorded.parts[part].progress;
    const uint64_t before = progress.load(std::memory_order_acquire);
    if (before % 2 == 0) continue;
    const uint64_t step = steps.steps_of(part, operation.what.parts).first + before / 2;
    const Steps::Bounds range = steps.bytes_of(step);
    const uint64_t bytes = range.last - range.first;
    std::memcpy(operation.target + range.first, recorded.undo + uint64_t{part} * operation.chunk,
                bytes);
    if (operation.sync) persist(operation.target + range.first, bytes);
    progress.store(before - 1, std::memory_order_release);
    if (operation.sync) persist(&progress, sizeof progress);
  }
}

int64_t cell_before(const Recorded& recorded) {
  int64_t before;
  std::memcpy(&before, recorded.undo, sizeof before);
  return before;
}

}  // namespace hbm::box::server::storage
