#include <algorithm>
#include <string>

#include "base/dtype.h"
#include "box/refusal.h"
#include "box/reply.h"
#include "box/requests.h"
#include "reduce/accumulate.h"

namespace hbm::box {
namespace {

Dtype dtype_of(const smb::Accumulate& request) {
  if (request.dtype >= kDtypeCount) {
    throw Refusal(smb::Status::kMalformed, "its type does not exist");
  }
  const auto dtype = static_cast<Dtype>(request.dtype);
  if (const char* cause = accumulate_unsupported(dtype)) {
    throw Refusal(smb::Status::kUnsupported,
                  std::string("cannot accumulate ") + dtype_name(dtype) + ": " + cause);
  }
  return dtype;
}

void require_apart(const smb::Accumulate& request, const Attachment& target,
                   const Attachment& source) {
  if (target.segment != source.segment || request.target_offset == request.source_offset) return;
  const auto [low, high] = std::minmax(request.target_offset, request.source_offset);
  if (high - low < request.bytes) {
    throw Refusal(smb::Status::kUnsupported,
                  "the source overlaps the target: they may be the same range, or apart");
  }
}

}  // namespace

Reply Requests::accumulate(Session& session, const smb::Accumulate& request) {
  const Attachment target = attached(session, request.target);
  const Attachment source = attached(session, request.source);
  require_write(session, target);
  const Dtype dtype = dtype_of(request);
  const size_t unit = element_size(dtype);
  require_range(*target.segment, request.target_offset, request.bytes, unit);
  require_range(*source.segment, request.source_offset, request.bytes, unit);
  require_apart(request, target, source);
  accumulator_.accumulate(
      session.record, request.sequence.number, {*target.segment, request.target_offset},
      {*source.segment, request.source_offset}, request.bytes, dtype, request.scale);
  for (Tally* tally : {&totals_, &session.tally, &target.segment->tally}) {
    tally->count(smb::Opcode::kAccumulate, request.bytes);
  }
  return {};
}

Reply Requests::fetch_add(Session& session, const smb::FetchAdd& request) {
  const Attachment cell = attached(session, request.handle);
  require_write(session, cell);
  require_range(*cell.segment, request.offset, sizeof(int64_t), sizeof(int64_t));
  const int64_t before = accumulator_.fetch_add(session.record, request.sequence.number,
                                                {*cell.segment, request.offset}, request.addend);
  for (Tally* tally : {&totals_, &session.tally, &cell.segment->tally}) {
    tally->count(smb::Opcode::kFetchAdd, sizeof before);
  }
  return with_body(smb::Fetched{before});
}

}  // namespace hbm::box
