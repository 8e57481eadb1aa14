// What a group leaves behind: its keys in the store, and all of it if the process ends.
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "bootstrap/gather.h"
#include "pg_hbm.h"
#include "process_group/monitored_barrier.h"

namespace hbm {
namespace {

constexpr std::chrono::milliseconds kRemovalPatience{200};

}  // namespace

// Removes the group's keys from the store, once for all ranks, which have all come to destroy it. A
// rank that asks a store whose server has ended has PyTorch print a warning, so the serving rank
// does it, or rank 0 if no rank serves the store. If a rank outside the group serves it, they stay.
void ProcessGroupHbm::remove_keys() {
  const bool removes = connection_.server == StoreServer::kThisProcess ||
                       (connection_.server == StoreServer::kNoRank && rank_ == 0);
  if (!removes) return;
  const bootstrap::Participant& participant = connection_.rendezvous.participant;
  const auto until = std::chrono::steady_clock::now() + kRemovalPatience;
  try {
    bootstrap::remove_steps(participant, until);
    participant.store->remove(MonitoredBarrier::keys_of(participant, barriers_), until);
  } catch (const Error& error) {
    log::debug(name_ + " has left keys in the store: " + error.what());
  }
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
