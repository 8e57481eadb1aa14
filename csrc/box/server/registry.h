// The segments of a box by their keys, and their attachments.
//
// A segment has its key until it is deleted. A temporary segment is also deleted when its last
// attachment ends. The memory of a segment stays until the last pointer to the segment is
// destroyed.
//
// Threads: any. Creating or deleting a segment may take long. The lock is not held during that
// time, so only callers for the same key wait.
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

namespace hbm::box::server {

struct OpenedSegment {
  std::shared_ptr<storage::BoxSegment> segment;
  bool created = false;
};

class Registry {
 public:
  // Begins with the segments of the store. Temporary ones stay at least until remove_unattached(),
  // even without attachments: after a restart, clients that use them have yet to reconnect.
  explicit Registry(storage::Store& store);
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // Each OpenedSegment is one attachment, which release() ends.
  //
  // Throw Refusal if no segment has the key (attach), a segment has it already (create), or a
  // segment of another size has it. Also throw the errors of Store::create() and of the action of
  // on_new_segment(). Nothing has changed then.
  enum class Size { kSame, kAny };
  OpenedSegment attach(const protocol::Id& key, uint64_t bytes, Size size);
  OpenedSegment create(const storage::Creation& creation);  // no key: a random one
  OpenedSegment attach_or_create(const storage::Creation& creation);

  // Returns true if a segment has the key. Waits while a segment with this key is being created or
  // deleted.
  bool exists(const protocol::Id& key);

  // Returns an attachment to the segment that the request `creator` created before the restart of
  // the box, or none.
  OpenedSegment created_by(const storage::Creator& creator);

  void release(const std::shared_ptr<storage::BoxSegment>& segment) noexcept;

  // Removes the key of the segment. Throws Refusal(kNoSuchKey) if the key was removed before, Error
  // if the store fails; nothing has changed then.
  void remove(const std::shared_ptr<storage::BoxSegment>& segment);

  // Removes temporary segments without attachments, whose clients did not reconnect after the
  // restart.
  void remove_unattached() noexcept;

  // Sets the action for each new segment, as RequestHandler::on_new_segment(). REQUIRES: no client
  // is served.
  void on_new_segment(std::function<void(storage::BoxSegment&)> action);

  std::vector<protocol::SegmentStats> statistics() const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Segments = std::map<protocol::Id, std::shared_ptr<storage::BoxSegment>>;

  Segments::iterator find(Lock& lock,
                          const protocol::Id& key);  // waits while the key is being changed
  OpenedSegment open(const Segments::iterator& found, uint64_t bytes, Size size);
  OpenedSegment make(Lock& lock, storage::Creation creation);
  std::shared_ptr<storage::BoxSegment> build(const storage::Creation& creation);
  void erase(Lock& lock, Segments::iterator found);

  storage::Store& store_;
  std::function<void(storage::BoxSegment&)> action_;  // set while no client is served
  mutable std::mutex mutex_;  // guards all below; no session or run queue is locked under it
  std::condition_variable changed_;
  Segments segments_;
  std::set<protocol::Id> changing_;
};

}  // namespace hbm::box::server
