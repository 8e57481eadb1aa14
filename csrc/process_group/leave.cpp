// The end of a group: its keys in the store are removed, or the process ends and it is left as it
// is.
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "bootstrap/gather.h"
#include "pg_hbm.h"
#include "process_group/monitored_barrier.h"

namespace hbm {

// Removes the group's keys from the store. REQUIRES: all ranks have come to destroy the group. One
// rank removes the keys of all: the one that serves the store, or rank 0 if no rank serves it.
// Other ranks must not ask, because PyTorch prints a warning if the store has ended. So the keys
// stay if a rank outside the group serves the store.
void ProcessGroupHbm::remove_keys() {
  const bool removes = connection_.server == StoreServer::kThisProcess ||
                       (connection_.server == StoreServer::kNoRank && rank_ == 0);
  if (!removes) return;
  const bootstrap::Participant& participant = connection_.rendezvous.participant;
  bootstrap::remove_steps(participant);
  participant.store->remove(MonitoredBarrier::keys_of(participant, barriers_));
}

// Leaves everything to the end of the process (base/process_end.h). Parked threads stand in the
// middle of it, and a callback that is dropped now would take Python's lock.
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
