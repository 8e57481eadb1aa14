#include "box/server/message_ring.h"

#include <stdexcept>
#include <utility>

namespace hbm::box {

MessageRing::MessageRing(size_t capacity, size_t handlers, Handler handler)
    : handler_(std::move(handler)), slots_(capacity) {
  try {
    for (size_t i = 0; i < handlers; ++i) threads_.emplace_back(&MessageRing::handle, this);
  } catch (...) {
    close();
    throw;
  }
}

MessageRing::~MessageRing() { close(); }

bool MessageRing::put(const std::shared_ptr<Session>& session) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    if (count_ == slots_.size()) throw std::length_error("the message ring is full");
    slots_[(first_ + count_++) % slots_.size()] = session;
  }
  filled_.notify_one();
  return true;
}

void MessageRing::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  filled_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

std::shared_ptr<Session> MessageRing::take() {
  std::unique_lock lock(mutex_);
  filled_.wait(lock, [this] { return count_ > 0 || closed_; });
  if (count_ == 0) return nullptr;
  --count_;
  std::shared_ptr<Session> session = std::move(slots_[first_]);
  first_ = (first_ + 1) % slots_.size();
  return session;
}

void MessageRing::handle() {
  while (std::shared_ptr<Session> session = take()) handler_(std::move(session));
}

}  // namespace hbm::box
