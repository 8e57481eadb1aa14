#include "box/server/run_queue.h"

#include <stdexcept>
#include <utility>

namespace hbm::box::server {

RunQueue::RunQueue(size_t capacity, size_t handlers, Handler handler)
    : handler_(std::move(handler)), sessions_(capacity) {
  try {
    for (size_t i = 0; i < handlers; ++i) threads_.emplace_back(&RunQueue::handle, this);
  } catch (...) {
    close();
    throw;
  }
}

RunQueue::~RunQueue() { close(); }

bool RunQueue::put(const std::shared_ptr<Session>& session) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    if (count_ == sessions_.size()) throw std::length_error("the run queue is full");
    sessions_[(first_ + count_++) % sessions_.size()] = session;
  }
  filled_.notify_one();
  return true;
}

void RunQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  filled_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

std::shared_ptr<Session> RunQueue::take() {
  std::unique_lock lock(mutex_);
  filled_.wait(lock, [this] { return count_ > 0 || closed_; });
  if (count_ == 0) return nullptr;
  --count_;
  std::shared_ptr<Session> session = std::move(sessions_[first_]);
  first_ = (first_ + 1) % sessions_.size();
  return session;
}

void RunQueue::handle() {
  while (std::shared_ptr<Session> session = take()) handler_(std::move(session));
}

}  // namespace hbm::box::server
