// The end of a group: the ranks pass a last barrier, and one rank removes the group's keys from the
// store. A group that still exists when its process ends does neither.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "bootstrap/gather.h"
#include "communicator/tuning.h"
#include "pg_hbm.h"
#include "process_group/monitored_barrier.h"

namespace hbm::process_group {

// Passes a last barrier. Returns true if all ranks have arrived. MPI delivers a message only while
// its sender calls MPI, so a rank that ended before the barrier might leave its messages
// undelivered. Waits for late ranks for kPartingTimeout at most.
bool ProcessGroupHbm::part() {
  if (queue_->broken()) return false;
  if (size_ == 1) return true;
  try {
    if (!queue_->try_claim("destroy_process_group")) return false;
  } catch (const Error&) {
    return false;  // the group failed concurrently
  }
  bool all_came = false;
  try {
    const auto farewell = progress::OperationQueue::create(
        progress::OperationQueue::Order::kOrdered, connection_.oversubscribed, {});
    const uint64_t sequence = getSequenceNumberForGroup() + 1;
    const auto request = farewell->enqueue(
        connection_.communicator->barrier(sequence),
        std::min(communicator::kPartingTimeout, std::chrono::milliseconds(timeout_ms_)), {});
    farewell->launch(request, progress::Mode::kSync);
    farewell->stop();
    if (request->error()) std::rethrow_exception(request->error());
    all_came = true;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kMismatch) {
      log::error(name_ + " was destroyed after its ranks had come apart: " + error.what());
    } else {
      log::info(name_ + " was destroyed before every rank came to do so: " + error.what());
    }
  } catch (...) {  // Ctrl-C
    queue_->unclaim();
    throw;
  }
  queue_->unclaim();
  return all_came;
}

// Removes the group's keys from the store. REQUIRES: all ranks have arrived at the destruction of
// the group. One rank removes the keys of all ranks: the rank that serves the store, or rank 0 if
// no rank serves it. Other ranks must not call the store, because PyTorch prints a warning if the
// store has ended. So the keys stay if a rank outside the group serves the store.
void ProcessGroupHbm::remove_keys() {
  const bool removes = connection_.server == bootstrap::StoreServer::kThisProcess ||
                       (connection_.server == bootstrap::StoreServer::kNoRank && rank_ == 0);
  if (!removes) return;
  const bootstrap::Participant& participant = connection_.rendezvous.participant;
  bootstrap::remove_steps(participant);
  participant.store->remove(MonitoredBarrier::keys_of(participant, barriers_));
}

// Keeps the group's objects until the process has ended (base/process_end.h). Parked threads still
// use these objects, and destroying a callback now would take Python's lock.
void ProcessGroupHbm::leave_all() {
  struct Left {
    communicator::connect::GroupConnection connection;
    std::shared_ptr<progress::OperationQueue> queue;
    std::shared_ptr<progress::OperationQueue> p2p_queue;
    std::shared_ptr<DeviceStreams> device_streams;
    std::map<std::thread::id, CoalescedBatch> batches;
  };
  static std::mutex mutex;
  static auto* const all = new std::vector<Left>;  // static: leak checkers see a reference to it
  const std::lock_guard lock(mutex);
  all->push_back({connection_, queue_, p2p_queue_, device_streams_, std::move(batches_)});
}

}  // namespace hbm::process_group
