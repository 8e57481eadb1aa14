// The description of a group and its operations for a profile (process_group/profile.h).
#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <utility>

#include "pg_hbm.h"
#include "process_group/store_connection.h"

namespace hbm::process_group {
namespace {

// Returns FNV-1a of the text, in hexadecimal.
std::string hash(const std::string& text) {
  uint64_t value = 0xcbf29ce484222325;
  for (const char each : text) value = (value ^ static_cast<uint8_t>(each)) * 0x100000001b3;
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(value));
  return digits.data();
}

}  // namespace

std::shared_ptr<const Profile::Group> ProcessGroupHbm::describe_group_for_profile() const {
  const auto& [participant, members] = connection_.rendezvous;
  const std::string key =
      members.front().process + "/" + key_prefix(store_) + participant.prefix + name_;
  const std::vector<int>& nodes = connection_.node_of;
  const size_t different = std::set<int>(nodes.begin(), nodes.end()).size();
  const bool one_node = different == 1;
  const bool one_rank_each = different == nodes.size();
  return std::make_shared<const Profile::Group>(
      Profile::Group{.key = hash(key),
                     .name = name_,
                     .rank = rank_,
                     .ranks = options_->numbers_in_job(size_),
                     .nodes = nodes,
                     .path_of_collectives = one_node        ? Path::kShm
                                            : one_rank_each ? Path::kMpi
                                                            : Path::kShmAndMpi,
                     .path_of_messages = one_node ? Path::kShm : Path::kMpi});
}

Profile::Issued ProcessGroupHbm::describe_for_profile(const OperationKind& kind, int peer,
                                                      bool async,
                                                      std::span<const at::Tensor> inputs,
                                                      std::span<const at::Tensor> outputs) const {
  const memory::SharedSegment* const segment = connection_.segment.get();
  bool on_device = false;
  bool in_segment = segment != nullptr;
  const auto bytes_of = [&](std::span<const at::Tensor> tensors) {
    int64_t bytes = 0;
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      on_device = on_device || !tensor.is_cpu();
      if (tensor.is_sparse()) {
        bytes += static_cast<int64_t>(tensor._values().nbytes() + tensor._indices().nbytes());
        in_segment = false;
        continue;
      }
      if (tensor.layout() != at::kStrided) {
        in_segment = false;
        continue;
      }
      bytes += static_cast<int64_t>(tensor.nbytes());
      in_segment = in_segment && tensor.is_cpu() && StagedTensors::usable(tensor) &&
                   segment->contains(tensor.const_data_ptr(), tensor.nbytes());
    }
    return bytes;
  };
  const int64_t bytes = std::max(bytes_of(inputs), bytes_of(outputs));
  return {.group = profiled_group_,
          .kind = &kind,
          .peer = peer,
          .bytes = bytes,
          .place = on_device    ? Profile::Place::kDevice
                   : in_segment ? Profile::Place::kSegment
                                : Profile::Place::kOrdinary,
          .async = async};
}

// The queue calls the function after the poll() that completes the operation, on the same thread,
// and destroys the operation later.
std::function<void()> ProcessGroupHbm::at_end(const Call& call, WorkHbm& work,
                                              const progress::Operation& operation,
                                              uint64_t profiled) {
  std::function<void()> end = call.part_done ? call.part_done : work.end_of_range();
  if (profiled == 0) return end;
  return [profiled, &operation, end = std::move(end)] {
    Profile::ended(profiled, operation.observed());
    if (end) end();
  };
}

}  // namespace hbm::process_group
