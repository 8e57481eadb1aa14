#include "communicator/mpi/channel.h"

#include <bit>
#include <list>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "communicator/mpi/tuning.h"

namespace hbm::communicator::mpi {
namespace {

// Returns the bytes of the pool that the largest operation takes: TwoPhase, on a rank that sends to
// and receives from all ranks. The pool rounds the memory of a Round up to a power of two.
uint64_t operation_bytes(size_t chunk, uint64_t size) {
  const uint64_t buffer = chunk + kHeaderBytes;
  const uint64_t first_phase = std::bit_ceil(2 * (size - 1) * buffer);
  const uint64_t second_phase = std::bit_ceil(size * buffer);
  return 2 * (first_phase + second_phase);
}

struct OrphanedRequests {
  std::shared_ptr<Comm> communicator;
  std::vector<Request> requests;
  memory::StagingBuffer memory;
};

std::mutex orphaned_mutex;  // guards orphaned()

// Never destroyed: at exit MPI may still write to the memory.
std::list<OrphanedRequests>& orphaned() {
  static auto* const all = new std::list<OrphanedRequests>;
  return *all;
}

bool at_rest(OrphanedRequests& each) {
  if (each.communicator->in_child()) return false;
  const Carrier& carrier = each.communicator->carrier();
  bool all = true;
  for (Request& request : each.requests) {
    if (request && !carrier.test_ended(request)) all = false;
  }
  return all;
}

}  // namespace

Comm::Comm(std::shared_ptr<const Carrier> carrier, CommHandle comm)
    : carrier_(std::move(carrier)),
      comm_(comm),
      user_tags_((carrier_->highest_tag(comm) - 2 * kTagRanges) / 2) {}

Comm::~Comm() {
  if (!leaked_ && !fork_.in_child() && !carrier_->finalised()) carrier_->free(comm_);
}

Request Comm::isend(const void* data, size_t bytes, int peer, int tag) {
  return carrier_->isend(data, bytes, peer, tag, comm_);
}

Request Comm::irecv(void* data, size_t bytes, int peer, int tag) {
  return carrier_->irecv(data, bytes, peer, tag, comm_);
}

Request Comm::irecv_any(void* data, size_t bytes, int tag, int& peer) {
  return carrier_->irecv_any(data, bytes, tag, comm_, peer);
}

void Comm::cancel_receive(Request request) noexcept {
  if (request && !fork_.in_child()) carrier_->cancel(request);
}

void Comm::withdraw(const std::vector<Request>& requests) noexcept {
  if (fork_.in_child()) return;
  for (const Request request : requests) {
    if (request) carrier_->withdraw(request);
  }
}

size_t chunk_bytes(uint64_t staging_bytes, int size) {
  const auto ranks = static_cast<uint64_t>(size);
  for (size_t chunk = kLargestChunkBytes; chunk >= kSmallestChunkBytes; chunk /= 2) {
    const uint64_t needed = operation_bytes(chunk, ranks);
    const bool smallest = chunk == kSmallestChunkBytes;
    if (needed <= staging_bytes && (needed <= kMostOperationBytes || smallest)) return chunk;
  }
  throw Error(ErrorKind::kInvalid, "staging_bytes is " + std::to_string(staging_bytes) +
                                       ", and a group of " + std::to_string(size) +
                                       " ranks needs at least " +
                                       std::to_string(operation_bytes(kSmallestChunkBytes, ranks)));
}

void orphan_requests(const std::shared_ptr<Comm>& communicator, std::vector<Request> requests,
                     memory::StagingBuffer memory) noexcept {
  OrphanedRequests orphan{communicator, std::move(requests), std::move(memory)};
  communicator->leak();
  communicator->withdraw(orphan.requests);
  if (at_rest(orphan)) return;
  const std::lock_guard lock(orphaned_mutex);
  orphaned().push_back(std::move(orphan));
}

size_t sweep_orphaned() noexcept {
  const std::lock_guard lock(orphaned_mutex);
  orphaned().remove_if(at_rest);
  size_t held = 0;
  for (const OrphanedRequests& each : orphaned()) held += each.memory.size();
  return held;
}

}  // namespace hbm::communicator::mpi
