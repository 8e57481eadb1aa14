#include "box/server/accumulator.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/error.h"
#include "box/server/storage/segment.h"
#include "box/server/tuning.h"

namespace hbm::box {
namespace {

SegmentOffset place_of(const At& at) {
  return {at.segment.stored ? at.segment.stored->serial : 0, at.offset};
}

}  // namespace

Accumulator::Accumulator(Records& records, unsigned threads)
    : records_(records), threads_(threads), pool_(threads - 1) {}

uint32_t Accumulator::lanes_for(uint64_t offset, uint64_t bytes) const {
  if (bytes < kSharedAccumulateBytes || threads_ == 1) return 1;
  const Steps steps{offset, bytes, records_.sizes().chunk};
  const uint32_t most = std::min(records_.sizes().lanes, kAccumulateRunsPerThread * threads_);
  return static_cast<uint32_t>(std::min<uint64_t>(steps.count(), most));
}

void Accumulator::run(const BoundOperation& operation, const Recorded& recorded) {
  try {
    pool_.run(operation.what.lanes,
              [&](uint32_t lane) { run_lane(operation, lane, recorded, stripes_); });
  } catch (const Error&) {
    records_.give_up();
    throw;
  }
}

void Accumulator::accumulate(SessionRecord& session, uint64_t number, At target, At source,
                             uint64_t bytes, const Formula& formula) {
  if (bytes == 0) return records_.finish(session, {.number = number});
  const BoxOperation what{.opcode = smb::Opcode::kAccumulate,
                          .lanes = lanes_for(target.offset, bytes),
                          .number = number,
                          .target = place_of(target),
                          .source = place_of(source),
                          .bytes = bytes,
                          .formula = formula};
  const BoundOperation operation{what, target.segment.block->base(), source.segment.block->base(),
                                 records_.sizes().chunk, records_.sync()};
  if (operation.sync) persist(operation.source + source.offset, formula.source_bytes(bytes));
  const Recorded recorded = records_.begin(session, what);
  run(operation, recorded);
  records_.finish(session, {.number = number});
  records_.release(recorded);
}

int64_t Accumulator::fetch_add(SessionRecord& session, uint64_t number, At cell, int64_t addend) {
  const BoxOperation what{.opcode = smb::Opcode::kFetchAdd,
                          .number = number,
                          .target = place_of(cell),
                          .source = {},
                          .bytes = sizeof(int64_t),
                          .addend = addend};
  const BoundOperation operation{what, cell.segment.block->base(), nullptr, records_.sizes().chunk,
                                 records_.sync()};
  const Recorded recorded = records_.begin(session, what);
  LaneProgress own_lane;
  std::array<std::byte, sizeof(int64_t)> own_undo;
  const Recorded used = recorded ? recorded : Recorded{nullptr, &own_lane, own_undo.data()};
  run(operation, used);
  const int64_t before = cell_before(used);
  records_.finish(session, {.number = number, .value = before});
  records_.release(recorded);
  return before;
}

}  // namespace hbm::box
