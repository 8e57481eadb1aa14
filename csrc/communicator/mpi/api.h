// The functions of MPI that hbm calls, for a library of either ABI (abi.h). communicator/carrier.h
// has the functions that move messages. api.cpp has one implementation for each ABI; make_api()
// chooses when the library is loaded.
//
// Threads: after initialise() has returned, and if threads_multiple() is true, any thread may call
// every member.
//
// Errors: unless a comment says otherwise, a call that fails throws Error(kNetwork) with the name
// of MPI's function and MPI's text. The user's program may call MPI_Finalize (mpi4py does). After
// that, create() and the functions that start or test a request throw Error(kUnavailable). But
// test_ended() returns true, and cancel() and free() do nothing.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "communicator/carrier.h"

namespace hbm::communicator::mpi {

// A library that the process has loaded.
struct SharedObject {
  void* handle = nullptr;  // as dlopen() returns it
  std::string path;
};

class Api : public Carrier {
 public:
  // These three and finalised() may be called at any time. version() is the library's name and
  // version, abi() the name of its ABI.
  virtual std::string version() const = 0;
  virtual std::string abi() const = 0;
  virtual bool initialised() const = 0;

  // Calls MPI_Init_thread, and asks for MPI_THREAD_MULTIPLE.
  virtual void initialise() const = 0;
  virtual bool threads_multiple() const = 0;
  virtual void finalise() const noexcept = 0;

  // The functions of the world. After return_errors() the functions of MPI return an error code and
  // do not abort.
  virtual void return_errors() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Copies rank 0's data to every rank.
  virtual void broadcast(void* data, std::size_t bytes) const = 0;
  virtual Request barrier() const = 0;

  // Creates a communicator of the given world ranks, in that order. Only these ranks call it. `tag`
  // distinguishes concurrent creations.
  virtual CommHandle create(const std::vector<int>& world_ranks, int tag) const = 0;
};

// Detects the ABI of the library, and returns its implementation. Throws Error(kUnavailable) with
// the library's path if the library has neither ABI, or lacks a function.
std::unique_ptr<const Api> make_api(const SharedObject& library);

}  // namespace hbm::communicator::mpi
