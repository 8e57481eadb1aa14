// A group that goes while the process ends (base/process_end.h).
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "pg_hbm.h"

namespace hbm {

// Leaves everything to the end of the process. Parked threads stand in the middle of it, and a
// callback that is dropped now would take Python's lock.
void ProcessGroupHbm::leave_all() {
  struct Left {
    GroupConnection connection;
    std::shared_ptr<OperationQueue> queue;
    std::shared_ptr<OperationQueue> p2p_queue;
    std::shared_ptr<DeviceStreams> device_streams;
    std::map<std::thread::id, CoalescedBatch> batches;
  };
  static std::mutex mutex;
  static auto* const all = new std::vector<Left>;  // for leak checkers
  const std::lock_guard lock(mutex);
  all->push_back({connection_, queue_, p2p_queue_, device_streams_, std::move(batches_)});
}

}  // namespace hbm
