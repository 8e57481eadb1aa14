#include "communicator/mpi/abandoned_requests.h"

#include <algorithm>
#include <list>
#include <mutex>
#include <utility>

namespace hbm::mpi {
namespace {

struct AbandonedRequests {
  std::shared_ptr<Channel> channel;
  std::vector<MPI_Request> requests;
  memory::StagingBuffer memory;
};

std::mutex mutex;

// Never destroyed: what lies here at exit, MPI may still write to.
std::list<AbandonedRequests>& graves() {
  static auto* const all = new std::list<AbandonedRequests>;
  return *all;
}

bool at_rest(AbandonedRequests& grave) {
  if (grave.channel->communicator->in_child()) return false;
  const MpiLibrary& mpi = grave.channel->communicator->mpi();
  bool all = true;
  for (MPI_Request& request : grave.requests) {
    if (request == MPI_REQUEST_NULL) continue;
    int done = 0;
    // An error also completes the request, which is all that matters here.
    if (mpi.Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done == 0) all = false;
  }
  return all;
}

}  // namespace

void abandon_requests(const std::shared_ptr<Channel>& channel, std::vector<MPI_Request> requests,
                      memory::StagingBuffer memory) noexcept {
  AbandonedRequests grave{channel, std::move(requests), std::move(memory)};
  if (at_rest(grave)) return;
  channel->communicator->leak();
  const std::lock_guard lock(mutex);
  graves().push_back(std::move(grave));
}

size_t sweep() noexcept {
  const std::lock_guard lock(mutex);
  graves().remove_if(at_rest);
  size_t held = 0;
  for (const AbandonedRequests& grave : graves()) held += grave.memory.size();
  return held;
}

}  // namespace hbm::mpi
