#include <string>

#include "base/dtype.h"
#include "box/server/refusal.h"
#include "box/server/reply.h"
#include "box/server/requests.h"
#include "kernels/accumulate.h"

namespace hbm::box {
namespace {

Formula formula_of(const smb::Accumulate& request) {
  if (request.dtype >= kDtypeCount || request.source_dtype >= kDtypeCount) {
    throw Refusal(smb::Status::kMalformed, "its type does not exist");
  }
  if (request.combine >= kCombineCount) {
    throw Refusal(smb::Status::kMalformed, "it neither adds nor assigns");
  }
  const Formula formula{.target = static_cast<Dtype>(request.dtype),
                        .source = static_cast<Dtype>(request.source_dtype),
                        .combine = static_cast<Combine>(request.combine),
                        .scale = request.scale};
  if (const char* cause = accumulate_unsupported(formula.target, formula.source)) {
    throw Refusal(smb::Status::kUnsupported, std::string("cannot accumulate ") +
                                                 dtype_name(formula.source) + " into " +
                                                 dtype_name(formula.target) + ": " + cause);
  }
  return formula;
}

void require_apart(const smb::Accumulate& request, const Formula& formula, const BoxSegment* target,
                   const BoxSegment* source) {
  const uint64_t to = request.target_offset, from = request.source_offset;
  if (target != source || (to == from && formula.target == formula.source)) return;
  if (to < from + formula.source_bytes(request.bytes) && from < to + request.bytes) {
    throw Refusal(
        smb::Status::kUnsupported,
        "the source overlaps the target: they may be apart, or the same range of one type");
  }
}

}  // namespace

Reply Requests::accumulate(Session& session, const smb::Accumulate& request) {
  const SessionAttachment target = attached(session, request.target);
  const SessionAttachment source = attached(session, request.source);
  require_write(session, target);
  const Formula formula = formula_of(request);
  require_range(*target.segment, request.target_offset, request.bytes,
                element_size(formula.target));
  require_range(*source.segment, request.source_offset, formula.source_bytes(request.bytes),
                element_size(formula.source));
  require_apart(request, formula, target.segment.get(), source.segment.get());
  accumulator_.accumulate(session.record, request.sequence.number,
                          {*target.segment, request.target_offset},
                          {*source.segment, request.source_offset}, request.bytes, formula);
  for (Counters* counters : {&totals_, &session.counters, &target.segment->counters}) {
    counters->count(smb::Opcode::kAccumulate, request.bytes);
  }
  return {};
}

Reply Requests::fetch_add(Session& session, const smb::FetchAdd& request) {
  const SessionAttachment cell = attached(session, request.handle);
  require_write(session, cell);
  require_range(*cell.segment, request.offset, sizeof(int64_t), sizeof(int64_t));
  const int64_t before = accumulator_.fetch_add(session.record, request.sequence.number,
                                                {*cell.segment, request.offset}, request.addend);
  for (Counters* counters : {&totals_, &session.counters, &cell.segment->counters}) {
    counters->count(smb::Opcode::kFetchAdd, sizeof before);
  }
  return with_body(smb::Fetched{before});
}

}  // namespace hbm::box
