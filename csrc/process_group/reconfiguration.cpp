#include "process_group/reconfiguration.h"

#include <algorithm>
#include <chrono>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "base/error.h"
#include "process_group/tuning.h"

namespace hbm::process_group {

std::shared_ptr<HandleStore> Reconfiguration::present() {
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  std::erase_if(served_, [now](const auto& each) { return each.first <= now; });
  if (!present_) present_ = std::make_shared<HandleStore>();
  return present_;
}

std::string Reconfiguration::handle() { return encode(present()->handle()); }

NextGroup Reconfiguration::meet(const std::vector<std::string>& handles, bool ordered, int64_t uuid,
                                const std::string& group, bootstrap::KeyValue::Deadline deadline) {
  const std::shared_ptr<HandleStore> own = present();
  bootstrap::Roster roster = bootstrap::make_roster(handles, ordered, own->handle().id);
  const bootstrap::Handle& first = roster.handles.front();
  const c10::intrusive_ptr<c10d::Store> store =
      roster.rank == 0 ? own->store() : open_store(first, group + " cannot be formed: ", deadline);
  using std::chrono::milliseconds;
  store->setTimeout(std::max(milliseconds(1), std::chrono::ceil<milliseconds>(
                                                  deadline - std::chrono::steady_clock::now())));
  NextGroup next;
  next.keys = connect_store(store);
  next.meeting = std::make_shared<bootstrap::Meeting>(std::move(roster), uuid, next.keys.group,
                                                      group, deadline);
  next.store = c10::make_intrusive<c10d::PrefixStore>(next.meeting->prefix(), store);
  if (!is_new(uuid)) {
    const std::string why = "uuid " + std::to_string(uuid) + " was already used for " + group +
                            "; each attempt needs another one, equal on all members";
    next.meeting->fail(why);
    throw Error(ErrorKind::kUnavailable, why);
  }
  next.meeting->meet();
  return next;
}

bool Reconfiguration::is_new(int64_t uuid) {
  const std::lock_guard lock(mutex_);
  return uuids_.insert(uuid).second;
}

void Reconfiguration::conclude(const NextGroup& next) {
  next.meeting->conclude();
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  std::erase_if(served_, [now](const auto& each) { return each.first <= now; });
  // The group holds its store too.
  if (next.rank() == 0) served_.emplace_back(now + kServedStoreTime, present_);
  present_.reset();
}

}  // namespace hbm::process_group
