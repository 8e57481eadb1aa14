#include "box/server/accumulator.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/error.h"
#include "box/server/storage/segment.h"
#include "box/server/tuning.h"

namespace hbm::box::server {
namespace {

storage::SegmentOffset location_of(const At& at) {
  return {at.segment.stored ? at.segment.stored->serial : 0, at.offset};
}

}  // namespace

Accumulator::Accumulator(storage::Records& records, unsigned threads)
    : records_(records), threads_(threads), pool_(threads - 1) {}

uint32_t Accumulator::parts_for(uint64_t offset, uint64_t bytes) const {
  if (bytes < kSharedAccumulateBytes || threads_ == 1) return 1;
  const storage::Steps steps{offset, bytes, records_.sizes().chunk};
  const uint32_t most = std::min(records_.sizes().parts, kAccumulateRunsPerThread * threads_);
  return static_cast<uint32_t>(std::min<uint64_t>(steps.count(), most));
}

void Accumulator::run(const storage::BoundOperation& operation, const storage::Recorded& recorded) {
  try {
    pool_.run(operation.what.parts,
              [&](uint32_t part) { storage::run_part(operation, part, recorded, stripes_); });
  } catch (const Error&) {
    records_.mark_failed();
    throw;
  }
}

void Accumulator::accumulate(storage::SessionRecord& session, uint64_t number, At target, At source,
                             uint64_t bytes, const kernels::Formula& formula) {
  if (bytes == 0) return records_.finish(session, {.number = number});
  const storage::BoxOperation what{.opcode = protocol::Opcode::kAccumulate,
                                   .parts = parts_for(target.offset, bytes),
                                   .number = number,
                                   .target = location_of(target),
                                   .source = location_of(source),
                                   .bytes = bytes,
                                   .formula = formula};
  const storage::BoundOperation operation{what, target.segment.block->base(),
                                          source.segment.block->base(), records_.sizes().chunk,
                                          records_.sync()};
  if (operation.sync)
    storage::persist(operation.source + source.offset, formula.source_bytes(bytes));
  const storage::Recorded recorded = records_.begin(session, what);
  run(operation, recorded);
  records_.finish(session, {.number = number});
  records_.release(recorded);
}

int64_t Accumulator::fetch_add(storage::SessionRecord& session, uint64_t number, At cell,
                               int64_t addend) {
  const storage::BoxOperation what{.opcode = protocol::Opcode::kFetchAdd,
                                   .number = number,
                                   .target = location_of(cell),
                                   .source = {},
                                   .bytes = sizeof(int64_t),
                                   .addend = addend};
  const storage::BoundOperation operation{what, cell.segment.block->base(), nullptr,
                                          records_.sizes().chunk, records_.sync()};
  const storage::Recorded recorded = records_.begin(session, what);
  storage::PartProgress own_part;
  std::array<std::byte, sizeof(int64_t)> own_undo;
  const storage::Recorded used =
      recorded ? recorded : storage::Recorded{nullptr, &own_part, own_undo.data()};
  run(operation, used);
  const int64_t before = storage::cell_before(used);
  records_.finish(session, {.number = number, .value = before});
  records_.release(recorded);
  return before;
}

}  // namespace hbm::box::server
