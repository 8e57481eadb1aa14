#include "box/server/listener/pending_connections.h"

#include <iterator>

namespace hbm::box {

void PendingConnections::enter(const std::shared_ptr<Guest>& guest) {
  std::shared_ptr<Guest> oldest;
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() >= most_) oldest = take_oldest();
    waiting_.push_back({guest.get(), guest, Clock::now() + longest_});
    places_[guest.get()] = std::prev(waiting_.end());
  }
  if (oldest) oldest->dismiss("too many others came before it had joined");
}

void PendingConnections::leave(const Guest& guest) {
  const std::lock_guard lock(mutex_);
  const auto place = places_.find(&guest);
  if (place == places_.end()) return;
  waiting_.erase(place->second);
  places_.erase(place);
}

bool PendingConnections::dismiss_oldest(const char* cause) {
  std::shared_ptr<Guest> oldest;
  {
    const std::lock_guard lock(mutex_);
    oldest = take_oldest();
  }
  if (oldest) oldest->dismiss(cause);
  return oldest != nullptr;
}

int PendingConnections::sweep() {
  for (;;) {
    std::shared_ptr<Guest> late;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty()) return -1;
      const auto left = waiting_.front().until - Clock::now();
      if (left > Clock::duration::zero()) {
        return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
      }
      late = take_oldest();
    }
    if (late) late->dismiss("it did not join in time");
  }
}

std::shared_ptr<PendingConnections::Guest> PendingConnections::take_oldest() {
  while (!waiting_.empty()) {
    std::shared_ptr<Guest> oldest = waiting_.front().guest.lock();
    places_.erase(waiting_.front().key);
    waiting_.pop_front();
    if (oldest) return oldest;
  }
  return nullptr;
}

}  // namespace hbm::box
