#include "communicator/mpi/channel.h"

#include <bit>
#include <list>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "communicator/message.h"

namespace hbm::mpi {
namespace {

constexpr uint64_t kMostOfAnOperation = 16 << 20;
constexpr size_t kSmallestChunk = 4 << 10;
constexpr size_t kLargestChunk = 512 << 10;

// Returns what the pool, which rounds up to powers of two, gives to the operation that takes most:
// TwoPhase on a rank that sends to and receives from all.
uint64_t operation_bytes(size_t chunk, uint64_t size) {
  const uint64_t slot = chunk + kHeaderBytes;
  const uint64_t first_phase = std::bit_ceil(2 * (size - 1) * slot);
  const uint64_t second_phase = std::bit_ceil(size * slot);
  return 2 * (first_phase + second_phase);
}

struct AbandonedRequests {
  std::shared_ptr<Comm> communicator;
  std::vector<MPI_Request> requests;
  memory::StagingBuffer memory;
};

std::mutex abandoned_mutex;  // guards abandoned()

// Never destroyed: what lies here at exit, MPI may still write to.
std::list<AbandonedRequests>& abandoned() {
  static auto* const all = new std::list<AbandonedRequests>;
  return *all;
}

bool at_rest(AbandonedRequests& each) {
  if (each.communicator->in_child()) return false;
  const MpiLibrary& mpi = each.communicator->mpi();
  bool all = true;
  for (MPI_Request& request : each.requests) {
    if (request == MPI_REQUEST_NULL) continue;
    int done = 0;
    // An error also completes the request, which is all that matters here.
    if (mpi.Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done == 0) all = false;
  }
  return all;
}

}  // namespace

Comm::Comm(const MpiLibrary& library, MPI_Comm comm) : mpi_(library), comm_(comm) {
  mpi_.Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  int* upper = nullptr;
  int found = 0;
  mpi_.check(mpi_.Comm_get_attr(comm_, MPI_TAG_UB, &upper, &found), "MPI_Comm_get_attr");
  const int highest = found != 0 ? *upper : 32767;  // the least that MPI promises
  user_tags_ = (highest - 2) / 2;
}

Comm::~Comm() {
  if (leaked_ || fork_.in_child()) return;
  int finalized = 0;
  mpi_.Finalized(&finalized);
  if (finalized == 0) mpi_.Comm_free(&comm_);
}

MPI_Request Comm::isend(const void* data, size_t bytes, int peer, int tag) {
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_.check(mpi_.Isend(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, comm_, &request),
             "MPI_Isend");
  return request;
}

MPI_Request Comm::irecv(void* data, size_t bytes, int peer, int tag) {
  MPI_Request request = MPI_REQUEST_NULL;
  mpi_.check(mpi_.Irecv(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, comm_, &request),
             "MPI_Irecv");
  return request;
}

MPI_Request Comm::irecv_any(void* data, size_t bytes, int tag, int& peer) {
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Status status;
  int found = 0;
  mpi_.check(mpi_.Improbe(MPI_ANY_SOURCE, tag, comm_, &found, &message, &status), "MPI_Improbe");
  if (found == 0) return MPI_REQUEST_NULL;
  mpi_.check(mpi_.Imrecv(data, static_cast<int>(bytes), MPI_BYTE, &message, &request),
             "MPI_Imrecv");
  peer = status.MPI_SOURCE;
  return request;
}

void Comm::cancel_receive(MPI_Request& request) noexcept {
  if (request != MPI_REQUEST_NULL && !fork_.in_child()) mpi_.Cancel(&request);
}

size_t chunk_bytes(uint64_t staging_bytes, int size) {
  const auto ranks = static_cast<uint64_t>(size);
  for (size_t chunk = kLargestChunk; chunk >= kSmallestChunk; chunk /= 2) {
    const uint64_t needed = operation_bytes(chunk, ranks);
    const bool smallest = chunk == kSmallestChunk;
    if (needed <= staging_bytes && (needed <= kMostOfAnOperation || smallest)) return chunk;
  }
  throw Error(ErrorKind::kInvalid, "staging_bytes is " + std::to_string(staging_bytes) +
                                       ", and a group of " + std::to_string(size) +
                                       " ranks needs at least " +
                                       std::to_string(operation_bytes(kSmallestChunk, ranks)));
}

void abandon_requests(const std::shared_ptr<Comm>& communicator, std::vector<MPI_Request> requests,
                      memory::StagingBuffer memory) noexcept {
  AbandonedRequests given_up{communicator, std::move(requests), std::move(memory)};
  if (at_rest(given_up)) return;
  communicator->leak();
  const std::lock_guard lock(abandoned_mutex);
  abandoned().push_back(std::move(given_up));
}

size_t sweep_abandoned() noexcept {
  const std::lock_guard lock(abandoned_mutex);
  abandoned().remove_if(at_rest);
  size_t held = 0;
  for (const AbandonedRequests& each : abandoned()) held += each.memory.size();
  return held;
}

}  // namespace hbm::mpi
