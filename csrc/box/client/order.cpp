#include "box/client/order.h"

#include <algorithm>

namespace hbm::client::order {
namespace {

bool conflict(const Touch& one, const Touch& other) {
  return one.attachment->key == other.attachment->key && (one.changes || other.changes) &&
         one.begin < other.end && other.begin < one.end;
}

bool conflict(const Operation& one, const Touch& touch) {
  return std::any_of(one.touches.begin(), one.touches.end(),
                     [&](const Touch& mine) { return mine.attachment && conflict(mine, touch); });
}

void wait_behind(Operation& earlier, Operation& later) {
  if (!earlier.is_sequenced() || !later.is_sequenced()) {
    earlier.behind_finish.push_back(&later);
  } else if (earlier.stage != Operation::Stage::kPosted) {
    earlier.behind_post.push_back(&later);
  } else {
    return;
  }
  ++later.blockers;
}

std::vector<Operation*> release(std::vector<Operation*>& behind) {
  std::vector<Operation*> ready;
  for (Operation* later : behind) {
    if (--later->blockers > 0) continue;
    later->stage = Operation::Stage::kReady;
    ready.push_back(later);
  }
  behind.clear();
  return ready;
}

}  // namespace

bool blocked(const Touch& touch) {
  const auto& unfinished = *touch.attachment->unfinished;
  return std::any_of(unfinished.begin(), unfinished.end(),
                     [&](const Operation* earlier) { return conflict(*earlier, touch); });
}

void add(Operation& operation) {
  for (const Touch& touch : operation.touches) {
    if (!touch.attachment) continue;
    auto& unfinished = *touch.attachment->unfinished;
    for (Operation* earlier : unfinished) {
      if (earlier != &operation && conflict(*earlier, touch)) wait_behind(*earlier, operation);
    }
    if (unfinished.empty() || unfinished.back() != &operation) unfinished.push_back(&operation);
  }
  operation.stage = operation.blockers > 0 ? Operation::Stage::kBlocked : Operation::Stage::kReady;
}

std::vector<Operation*> posted(Operation& operation) {
  operation.stage = Operation::Stage::kPosted;
  return release(operation.behind_post);
}

std::vector<Operation*> finished(Operation& operation) {
  operation.stage = Operation::Stage::kFinished;
  for (const Touch& touch : operation.touches) {
    if (touch.attachment) std::erase(*touch.attachment->unfinished, &operation);
  }
  std::vector<Operation*> ready = release(operation.behind_post);
  const std::vector<Operation*> more = release(operation.behind_finish);
  ready.insert(ready.end(), more.begin(), more.end());
  return ready;
}

}  // namespace hbm::client::order
