#include "box/server/storage/recovery.h"

#include <string>
#include <vector>

#include "base/log.h"
#include "box/server/storage/bound_operation.h"
#include "kernels/accumulate.h"

namespace hbm::box {
namespace {

bool is_cell(const BoxOperation& what) { return what.opcode == smb::Opcode::kFetchAdd; }

bool lies_in(const Memory& memory, const SegmentOffset& place, uint64_t bytes) {
  return place.offset <= memory.size && bytes <= memory.size - place.offset;
}

bool lanes_sound(const BoundOperation& operation, const Recorded& recorded) {
  for (uint32_t lane = 0; lane < operation.what.lanes; ++lane) {
    const Steps::Bounds all = operation.steps().steps_of(lane, operation.what.lanes);
    const uint64_t progress = recorded.lanes[lane].progress.load(std::memory_order_acquire);
    if (progress > 2 * (all.last - all.first)) return false;
  }
  return true;
}

bool sound(const Formula& formula) {
  return static_cast<size_t>(formula.combine) < kCombineCount &&
         accumulate_unsupported(formula.target, formula.source) == nullptr;
}

bool sound(const BoundOperation& operation, const Recorded& recorded, uint32_t most_lanes,
           const Memory& target, const Memory& source) {
  const BoxOperation& what = operation.what;
  if (what.lanes < 1 || what.lanes > most_lanes || what.bytes == 0) return false;
  if (!lies_in(target, what.target, what.bytes) || !lanes_sound(operation, recorded)) return false;
  if (is_cell(what)) return what.bytes == sizeof(int64_t) && what.target.offset % 8 == 0;
  const Formula& formula = what.formula;
  return what.opcode == smb::Opcode::kAccumulate && sound(formula) &&
         what.target.offset % element_size(formula.target) == 0 &&
         what.bytes % element_size(formula.target) == 0 &&
         lies_in(source, what.source, formula.source_bytes(what.bytes));
}

struct Begun {
  Recorded recorded;
  SessionRecord* session;
  BoundOperation operation;
};

}  // namespace

void recover(Records& records, const FindMemory& find) {
  std::vector<Begun> begun;
  for (const Recorded& recorded : records.begun()) {
    const BoxOperation& what = recorded.operation->what;
    SessionRecord* const session = records.session_of(*recorded.operation);
    const uint64_t applied = session ? session->applied.load(std::memory_order_acquire) : 0;
    if (session != nullptr && applied >= what.number) {
      records.release(recorded);
      continue;
    }
    const Memory target = find(what.target.serial);
    const Memory source = is_cell(what) ? target : find(what.source.serial);
    const BoundOperation operation{what, target.base, source.base, records.sizes().chunk,
                                   records.sync()};
    const char* cause = nullptr;
    if (session == nullptr || applied + 1 != what.number) {
      cause = "its session has ended";
    } else if (target.base == nullptr || source.base == nullptr) {
      cause = "its segments are not there any more";
    } else if (!sound(operation, recorded, records.sizes().lanes, target, source)) {
      cause = "its record is damaged";
    }
    if (cause == nullptr) {
      begun.push_back({recorded, session, operation});
      continue;
    }
    log::error(std::string("an operation that the last server had begun is dropped: ") + cause);
    if (session != nullptr && applied + 1 == what.number) {
      records.finish(*session, {.number = what.number, .status = smb::Status::kInternal});
    }
    records.release(recorded);
  }

  // All are rolled back before any goes on: what goes on may change a chunk that another one has to
  // put back.
  for (const Begun& one : begun) roll_back(one.operation, one.recorded);
  Stripes stripes;
  for (const Begun& one : begun) {
    const BoxOperation& what = one.operation.what;
    for (uint32_t lane = 0; lane < what.lanes; ++lane) {
      run_lane(one.operation, lane, one.recorded, stripes);
    }
    const int64_t value = is_cell(what) ? cell_before(one.recorded) : 0;
    records.finish(*one.session, {.number = what.number, .value = value});
    records.release(one.recorded);
  }
  if (!begun.empty()) {
    log::info("carried out " + std::to_string(begun.size()) +
              " operations that the last server had begun");
  }
}

}  // namespace hbm::box
