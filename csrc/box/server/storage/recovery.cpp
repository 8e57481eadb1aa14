#include "box/server/storage/recovery.h"

#include <string>
#include <vector>

#include "base/log.h"
#include "box/server/storage/bound_operation.h"
#include "box/server/storage/files.h"
#include "kernels/accumulate.h"

namespace hbm::box::server::storage {
namespace {

constexpr const char* kNoSession = "its session has ended";
constexpr const char* kNoSegments = "its segments are not there any more";

bool is_cell(const BoxOperation& what) { return what.opcode == protocol::Opcode::kFetchAdd; }

bool lies_in(const Memory& memory, const SegmentOffset& location, uint64_t bytes) {
  return location.offset <= memory.size && bytes <= memory.size - location.offset;
}

bool parts_sound(const BoundOperation& operation, const Recorded& recorded) {
  for (uint32_t part = 0; part < operation.what.parts; ++part) {
    const Steps::Bounds all = operation.steps().steps_of(part, operation.what.parts);
    const uint64_t progress = recorded.parts[part].progress.load(std::memory_order_acquire);
    if (progress > 2 * (all.last - all.first)) return false;
  }
  return true;
}

bool sound(const kernels::Formula& formula) {
  return static_cast<size_t>(formula.combine) < kCombineCount &&
         kernels::accumulate_unsupported(formula.target, formula.source) == nullptr;
}

bool sound(const BoundOperation& operation, const Recorded& recorded, uint32_t most_parts,
           const Memory& target, const Memory& source) {
  const BoxOperation& what = operation.what;
  if (what.parts < 1 || what.parts > most_parts || what.bytes == 0) return false;
  if (!lies_in(target, what.target, what.bytes) || !parts_sound(operation, recorded)) return false;
  if (is_cell(what)) return what.bytes == sizeof(int64_t) && what.target.offset % 8 == 0;
  const kernels::Formula& formula = what.formula;
  return what.opcode == protocol::Opcode::kAccumulate && sound(formula) &&
         what.target.offset % element_size(formula.target) == 0 &&
         what.bytes % element_size(formula.target) == 0 &&
         lies_in(source, what.source, formula.source_bytes(what.bytes));
}

}  // namespace

Recovery::Begun Recovery::inspect(const Recorded& recorded, const FindMemory& find) const {
  const BoxOperation& what = recorded.operation->what;
  SessionRecord* session = records_.session_of(*recorded.operation);
  if (session != nullptr && !session->sound()) session = nullptr;
  const uint64_t applied = session ? session->applied.load(std::memory_order_acquire) : 0;
  const bool done = session != nullptr && applied >= what.number;
  const Memory target = done ? Memory() : find(what.target.serial);
  const Memory source = is_cell(what) || done ? target : find(what.source.serial);
  Begun one{.recorded = recorded,
            .session = session,
            .operation = {what, target.base, source.base, records_.sizes().chunk, records_.sync()},
            .done = done};
  if (done) return one;
  if (session == nullptr || applied + 1 != what.number) {
    one.dropped = kNoSession;
  } else if (target.base == nullptr || source.base == nullptr) {
    one.dropped = kNoSegments;
  } else if (!recorded.operation->sound(recorded.parts, records_.sizes().parts) ||
             !sound(one.operation, recorded, records_.sizes().parts, target, source)) {
    one.dropped = "its record makes no sense";
  }
  return one;
}

Recovery::Recovery(Records& records, const FindMemory& find, bool lenient) : records_(records) {
  for (const Recorded& recorded : records.begun()) {
    begun_.push_back(inspect(recorded, find));
    const char* const why = begun_.back().dropped;
    if (why == nullptr || why == kNoSegments || lenient) continue;
    throw damaged(records.location().operations(),
                  std::string("it names an unfinished operation that is invalid: ") + why);
  }
}

void Recovery::drop(const Begun& one) {
  log::error(std::string("an operation that the last server had begun is dropped: ") + one.dropped);
  const uint64_t number = one.operation.what.number;
  if (one.session != nullptr && one.session->applied + 1 == number) {
    records_.finish(*one.session, {.number = number, .status = protocol::Status::kInternal});
  }
  records_.release(one.recorded);
}

void Recovery::execute() {
  std::vector<Begun> left;
  for (const Begun& one : begun_) {
    if (one.dropped != nullptr) {
      drop(one);
    } else if (one.done) {
      records_.release(one.recorded);
    } else {
      left.push_back(one);
    }
  }
  // Roll back all operations before any continues: one of them may change a chunk that another has
  // to restore.
  for (const Begun& one : left) roll_back(one.operation, one.recorded);
  Stripes stripes;
  for (const Begun& one : left) {
    const BoxOperation& what = one.operation.what;
    for (uint32_t part = 0; part < what.parts; ++part) {
      run_part(one.operation, part, one.recorded, stripes);
    }
    const int64_t value = is_cell(what) ? cell_before(one.recorded) : 0;
    records_.finish(*one.session, {.number = what.number, .value = value});
    records_.release(one.recorded);
  }
  if (!left.empty()) {
    log::info("completed " + std::to_string(left.size()) +
              " operations that the last server had begun");
  }
}

}  // namespace hbm::box::server::storage
