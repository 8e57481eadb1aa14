#include "communicator/mpi/comm.h"

namespace hbm::mpi {

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

}  // namespace hbm::mpi
