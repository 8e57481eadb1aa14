#include "node/reduce_scatter.h"

#include <algorithm>

#include "reduce/reduce.h"

namespace hbm::node {

ReduceScatter::ReduceScatter(std::shared_ptr<Team> team, const Signature& signature,
                             const std::vector<Source>& inputs, void* out, size_t divisor)
    : Streams(team, signature, inputs[0].count, inputs,
              std::vector<size_t>(team->size(), inputs[team->self()].count), Cast::kUni),
      own_(inputs[team->self()]),
      out_(static_cast<std::byte*>(out)),
      divisor_(divisor) {}

void ReduceScatter::deliver(size_t round) {
  const size_t bytes = own_.count * element();
  bool in_slots = false;
  for (size_t i = 0; i < team_->size(); ++i) {
    in_slots = in_slots || (i != team_->self() && incoming(i).direct == nullptr);
  }
  // The members' chunks are alike: they send the same numbers of elements to the same members.
  const size_t step = in_slots ? chunk() : bytes;
  const size_t first = round * step;
  if (first >= bytes) return;
  auto& sources = team_->sources();
  for (size_t i = 0; i < team_->size(); ++i) {
    if (i == team_->self()) {
      sources[i] = static_cast<const std::byte*>(own_.data) + first;
    } else if (incoming(i).direct != nullptr) {
      sources[i] = incoming(i).direct + first;
    } else {
      sources[i] = team_->data(team_->slot(i)) + incoming(i).offset;
    }
  }
  reduce(out_ + first, sources.data(), sources.size(), std::min(step, bytes - first) / element(),
         signature_.dtype, signature_.reduce_op, divisor_);
}

}  // namespace hbm::node
