// The segments of a box by their keys, and who may still reach each.
//
// A segment has its key from its creation until it is deleted, or, when it is temporary, until its
// last attachment ends. The memory stays as long as anyone holds the segment.
//
// Threads: every member may be called from any thread. While a segment is being made or removed,
// which may take long, the lock is free, and whoever wants that key waits.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "box/protocol/protocol.h"
#include "box/server/storage/segment.h"
#include "box/server/storage/store.h"

namespace hbm::box {

struct OpenedSegment {
  std::shared_ptr<BoxSegment> segment;
  bool created = false;
};

class Registry {
 public:
  // Begins with the store's segments. The temporary ones stay at least until remove_forsaken(): one
  // client may have left again before another is back.
  explicit Registry(Store& store);
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // Every OpenedSegment is one attachment, until release().
  // Throw Refusal when the key stands for something else than was asked for, and as Store::create()
  // does and on_new_segment()'s action when they fail; nothing has changed then.
  enum class Size { kSame, kAny };
  OpenedSegment attach(const smb::Id& key, uint64_t bytes, Size size);
  OpenedSegment create(const Creation& creation);  // no key: chooses one
  OpenedSegment attach_or_create(const Creation& creation);

  // Returns true if a segment has the key. Waits while a segment is made or removed under it.
  bool exists(const smb::Id& key);

  // The segment that a request created before the box was restarted, or none.
  OpenedSegment created_by(const Creator& creator);

  void release(const std::shared_ptr<BoxSegment>& segment) noexcept;

  // Takes its key away. Throws Refusal(kNoSuchKey) when it has none any more, Error when the store
  // fails; nothing has changed then.
  void remove(const std::shared_ptr<BoxSegment>& segment);

  // Removes temporary segments that nobody attached to: their clients did not come back.
  void remove_forsaken() noexcept;

  // Sets the action for each new segment, as RequestHandler::on_new_segment(). REQUIRES: no client
  // is served yet.
  void on_new_segment(std::function<void(BoxSegment&)> action);

  std::vector<smb::SegmentStats> statistics() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Segments = std::map<smb::Id, std::shared_ptr<BoxSegment>>;

  Segments::iterator find(Lock& lock, const smb::Id& key);  // waits until nobody changes the key
  OpenedSegment open(const Segments::iterator& found, uint64_t bytes, Size size);
  OpenedSegment make(Lock& lock, Creation creation);
  std::shared_ptr<BoxSegment> build(const Creation& creation);
  void erase(Lock& lock, Segments::iterator found);

  Store& store_;
  std::function<void(BoxSegment&)> action_;  // set before clients are served
  mutable std::mutex mutex_;  // guards all below; neither sessions nor the ring are locked under it
  std::condition_variable changed_;
  Segments segments_;
  std::set<smb::Id> changing_;
};

}  // namespace hbm::box
