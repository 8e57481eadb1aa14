#include "box/server/registry.h"

#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "box/protocol/proof.h"
#include "box/server/request_handler.h"
#include "box/server/storage/directory.h"

namespace hbm::box::server {
Registry::Registry(storage::Store& store) : store_(store) {
  for (std::shared_ptr<storage::BoxSegment>& segment : store.take_found()) {
    segment->awaited = true;
    segments_.emplace(segment->key, std::move(segment));
  }
}

OpenedSegment Registry::attach(const protocol::Id& key, uint64_t bytes, Size size) {
  Lock lock(mutex_);
  return open(find(lock, key), bytes, size);
}

OpenedSegment Registry::create(const storage::Creation& creation) {
  Lock lock(mutex_);
  if (find(lock, creation.key) != segments_.end()) {
    throw Refusal(protocol::Status::kExists, "a segment with the key " +
                                                 storage::hex(creation.key) +
                                                 " exists: attach to it, or choose another key");
  }
  return make(lock, creation);
}

OpenedSegment Registry::attach_or_create(const storage::Creation& creation) {
  Lock lock(mutex_);
  const auto found = find(lock, creation.key);
  if (found != segments_.end()) return open(found, creation.size, Size::kSame);
  return make(lock, creation);
}

bool Registry::exists(const protocol::Id& key) {
  Lock lock(mutex_);
  return find(lock, key) != segments_.end();
}

OpenedSegment Registry::created_by(const storage::Creator& creator) {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, segment] : segments_) {
    if (segment->creator != creator) continue;
    ++segment->attachments;
    return {segment, true};
  }
  return {};
}

void Registry::release(const std::shared_ptr<storage::BoxSegment>& segment) noexcept {
  Lock lock(mutex_);
  if (--segment->attachments > 0 || !segment->temporary || segment->awaited) return;
  const auto found = segments_.find(segment->key);
  if (found == segments_.end() || found->second != segment) return;
  try {
    erase(lock, found);
  } catch (const std::exception& error) {
    log::error("the temporary segment " + storage::hex(segment->key) + " stays: " + error.what());
  }
}

void Registry::remove(const std::shared_ptr<storage::BoxSegment>& segment) {
  Lock lock(mutex_);
  const auto found = find(lock, segment->key);
  if (found == segments_.end() || found->second != segment) {
    throw Refusal(protocol::Status::kNoSuchKey,
                  "the segment " + storage::hex(segment->key) + " was deleted already");
  }
  erase(lock, found);
}

void Registry::remove_unattached() noexcept {
  std::vector<std::shared_ptr<storage::BoxSegment>> unattached;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, segment] : segments_) {
      segment->awaited = false;
      if (!segment->temporary || segment->attachments > 0) continue;
      ++segment->attachments;
      unattached.push_back(segment);
    }
  }
  for (const auto& segment : unattached) release(segment);
}

void Registry::on_new_segment(std::function<void(storage::BoxSegment&)> action) {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, segment] : segments_) action(*segment);
  action_ = std::move(action);
}

std::vector<protocol::SegmentStats> Registry::statistics() const {
  const std::lock_guard lock(mutex_);
  std::vector<protocol::SegmentStats> rows;
  rows.reserve(segments_.size());
  for (const auto& [key, segment] : segments_) {
    rows.push_back({.key = key,
                    .counts = segment->counters.counts(),
                    .size = segment->size,
                    .attachments = segment->attachments,
                    .temporary = segment->temporary});
  }
  return rows;
}

Registry::Segments::iterator Registry::find(Lock& lock, const protocol::Id& key) {
  changed_.wait(lock, [&] { return !changing_.contains(key); });
  return segments_.find(key);
}

OpenedSegment Registry::open(const Segments::iterator& found, uint64_t bytes, Size size) {
  if (found == segments_.end()) {
    throw Refusal(protocol::Status::kNoSuchKey,
                  "no segment has this key: it was deleted, or never created here");
  }
  const auto& [key, segment] = *found;
  if (size == Size::kSame && segment->size != bytes) {
    throw Refusal(protocol::Status::kSizeMismatch,
                  std::to_string(bytes) + " bytes were asked for, and the segment " +
                      storage::hex(key) + " has " + std::to_string(segment->size));
  }
  ++segment->attachments;
  return {segment, false};
}

OpenedSegment Registry::make(Lock& lock, storage::Creation creation) {
  if (!creation.key) creation.key = protocol::random_id();
  const auto change = changing_.insert(creation.key).first;
  lock.unlock();
  std::shared_ptr<storage::BoxSegment> segment;
  std::exception_ptr failure;
  try {
    segment = build(creation);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  changing_.erase(change);
  changed_.notify_all();
  if (failure != nullptr) std::rethrow_exception(failure);
  segment->attachments = 1;
  segments_.emplace(creation.key, segment);
  return {segment, true};
}

std::shared_ptr<storage::BoxSegment> Registry::build(const storage::Creation& creation) {
  std::shared_ptr<storage::BoxSegment> segment = store_.create(creation);
  if (!action_) return segment;
  try {
    action_(*segment);
  } catch (...) {
    store_.remove(*segment);
    throw;
  }
  return segment;
}

void Registry::erase(Lock& lock, Segments::iterator found) {
  const auto change = changing_.insert(found->first).first;
  const auto taken = segments_.extract(found);
  lock.unlock();
  std::exception_ptr failure;
  try {
    store_.remove(*taken.mapped());
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  changing_.erase(change);
  changed_.notify_all();
  if (failure == nullptr) return;
  segments_.emplace(taken.key(), taken.mapped());
  std::rethrow_exception(failure);
}

}  // namespace hbm::box::server
