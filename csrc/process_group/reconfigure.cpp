// Changes of a group's members: reconfigure() in place, and shrink() to a new group. And the hooks
// that a program registers for the group's failure.
#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "bootstrap/claim.h"
#include "bootstrap/gather.h"
#include "pg_hbm.h"
#include "process_group/reconfiguration.h"
#include "process_group/tuning.h"
#include "process_group/types.h"

namespace hbm::process_group {
namespace {

using std::chrono::milliseconds;

constexpr int kShrinkAbort = 1;  // torch.distributed.SHRINK_ABORT

// A Work that is done.
c10::intrusive_ptr<c10d::Work> done_work() {
  const auto type = c10::ListType::create(c10::TensorType::get());
  auto future = c10::make_intrusive<c10::ivalue::Future>(type);
  future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
  return c10d::Work::create_from_future(future);
}

}  // namespace

Turnstile::Entry ProcessGroupHbm::enter() const {
  Turnstile::Entry entry = turnstile_.enter(name_);
  if (queue_) return entry;
  throw Error(ErrorKind::kInvalid,
              name_ +
                  " has no members yet: it was made with enable_reconfigure=True, so call "
                  "reconfigure() with the handles of its members first");
}

ReconfigureHandle ProcessGroupHbm::get_reconfigure_handle() const {
  return translated([&] {
    require_reconfigurable("get_reconfigure_handle");
    return reconfiguration_->handle();
  });
}

void ProcessGroupHbm::require_reconfigurable(const char* function) const {
  if (reconfiguration_) return;
  throw Error(ErrorKind::kInvalid,
              std::string(function) + ": " + name_ + " was made without enable_reconfigure=True");
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::reconfigure(const ReconfigureOptions& opts) {
  return translated([&] {
    require_reconfigurable("reconfigure");
    const std::lock_guard one(reconfigure_mutex_);
    const bool ordered = std::holds_alternative<std::vector<ReconfigureHandle>>(opts.handles);
    const std::vector<std::string> handles = std::visit(
        [](const auto& each) { return std::vector<std::string>(each.begin(), each.end()); },
        opts.handles);
    const auto deadline =
        progress::Clock::now() + opts.timeout.value_or(milliseconds(timeout_ms_.load()));
    const NextGroup next = reconfiguration_->meet(handles, ordered, opts.uuid, name_, deadline);
    // From here on all members have left the group as it was.
    if (queue_) retire("was reconfigured");
    communicator::connect::GroupConnection made;
    try {
      made = connect(next.store, next.rank(), next.size(), {}, deadline);
    } catch (const std::exception& error) {
      next.meeting->fail(error.what());
      throw;
    }
    reconfiguration_->conclude(next);
    replace(std::move(made), next);
    return done_work();
  });
}

// Puts a new connection in the place of the old one. Other threads may still be in calls of the
// group. Their calls end soon, because the queues are broken, and no call begins while the
// turnstile is closed.
void ProcessGroupHbm::replace(communicator::connect::GroupConnection made, const NextGroup& next) {
  const Turnstile::Closed closed(turnstile_);
  stop();
  if (connection_.communicator) connection_.communicator->invalidate();
  set_membership(next.rank(), next.size());
  log::set_rank(next.rank());
  store_ = next.store;
  std::vector<int> ranks(static_cast<size_t>(next.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  options_->global_ranks_in_group.assign(ranks.begin(), ranks.end());
  flight_record_.emplace(*this, std::move(ranks));
  sequence_ = 0;
  barriers_ = 0;
  windows_ = 0;
  shut_down_ = false;
  abort_hooks_.rearm();
  take(std::move(made));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupHbm::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) {
  return translated([&]() -> c10::intrusive_ptr<c10d::Backend> {
    const auto use = enter();
    std::vector<int> remaining;
    for (int rank = 0; rank < size_; ++rank) {
      if (std::ranges::count(ranks_to_exclude, rank) == 0) remaining.push_back(rank);
    }
    for (const int64_t rank : ranks_to_exclude) check_root(rank, "shrink");
    if (std::ranges::count(remaining, rank_) == 0) {
      throw Error(ErrorKind::kInvalid,
                  "shrink: rank " + std::to_string(rank_) + " of " + name_ +
                      " is one of the ranks to exclude; only the remaining ranks call it");
    }
    if ((shrink_flags & kShrinkAbort) != 0) retire("was shrunk");
    const std::vector<uint64_t> listed(remaining.begin(), remaining.end());
    c10::intrusive_ptr<c10d::Backend> made;
    try {
      made = split(c10::make_intrusive<c10d::PrefixStore>(
                       "hbm/shrink/" + bootstrap::list_members(listed), store_),
                   remaining, opts_override);
    } catch (const c10::DistNetworkError& error) {  // mostly the store is gone
      throw Error(ErrorKind::kNetwork,
                  std::string(error.what_without_backtrace()) +
                      "; torch_hbmcomm.reconfigure() needs no store of this group");
    }
    // The excluded ranks may live, and must not wait for this group again.
    if (!queue_->broken()) retire("was shrunk to the ranks " + bootstrap::list_members(listed));
    return made;
  });
}

void ProcessGroupHbm::registerAbortHook(int64_t hook_id, AbortHook hook) {
  abort_hooks_.add(hook_id, std::move(hook));
}

void ProcessGroupHbm::unregisterAbortHook(int64_t hook_id) { abort_hooks_.remove(hook_id); }

}  // namespace hbm::process_group
