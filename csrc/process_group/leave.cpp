// The end of a group: the ranks part, and one removes the group's keys from the store. If the
// process ends, the group stays as it is.
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

namespace hbm {

// Passes a last barrier, and returns true if all ranks have come. MPI delivers a message only while
// its sender calls MPI, so no rank may end before. Waits for late ranks for kPartingPatience at
// most.
bool ProcessGroupHbm::part() {
  if (queue_->broken()) return false;
  if (size_ == 1) return true;
  try {
    if (!queue_->try_claim("destroy_process_group")) return false;
  } catch (const Error&) {
    return false;  // the group broke while this rank came here
  }
  bool all_came = false;
  try {
    const auto farewell =
        OperationQueue::create(OperationQueue::Order::kOrdered, connection_.crowded, {});
    const uint64_t sequence = getSequenceNumberForGroup() + 1;
    const auto ticket =
        farewell->enqueue(connection_.communicator->barrier(sequence),
                          std::min(kPartingPatience, std::chrono::milliseconds(timeout_ms_)), {});
    farewell->launch(ticket, Mode::kSync);
    farewell->stop();
    if (ticket->error()) std::rethrow_exception(ticket->error());
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
