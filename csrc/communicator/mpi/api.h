// The functions of MPI that hbm calls, for a library of either ABI (abi.h). api.cpp has one
// implementation for each ABI; make_api() chooses when the library is loaded.
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
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace hbm::communicator::mpi {

// The library's value of a handle. Zero, which no object has in either ABI, is the null handle.
struct CommHandle {
  std::uintptr_t value = 0;
};
struct Request {
  std::uintptr_t value = 0;
  explicit operator bool() const noexcept { return value != 0; }
};

// A complete request: its index among the tested requests, and MPI's error code; 0: no error.
struct Completion {
  int index = 0;
  int error = 0;
};

// A library that the process has loaded.
struct SharedObject {
  void* handle = nullptr;  // as dlopen() returns it
  std::string path;
};

class Api {
 public:
  virtual ~Api() = default;

  // These four may be called at any time. version() is the library's name and version, abi() the
  // name of its ABI.
  virtual std::string version() const = 0;
  virtual std::string abi() const = 0;
  virtual bool initialised() const = 0;
  virtual bool finalised() const = 0;

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
  virtual void free(CommHandle comm) const noexcept = 0;
  virtual int highest_tag(CommHandle comm) const = 0;

  // Starts a send. The data must not move or change until the request is complete.
  virtual Request isend(const void* data, std::size_t bytes, int peer, int tag,
                        CommHandle comm) const = 0;
  // Starts a receive of at most `bytes`.
  virtual Request irecv(void* data, std::size_t bytes, int peer, int tag,
                        CommHandle comm) const = 0;
  // Starts to receive a message that has arrived, from any rank, and sets `peer` to the sender.
  // Returns null if no message has arrived.
  virtual Request irecv_any(void* data, std::size_t bytes, int tag, CommHandle comm,
                            int& peer) const = 0;
  // Asks MPI to cancel a receive. The receive must still be completed.
  virtual void cancel(Request request) const noexcept = 0;

  // Returns true if the request is complete, and then makes `request` null. Errors name `call`, the
  // function that started the request.
  virtual bool test(Request& request, const char* call) const = 0;
  // Returns true if the request is complete or has failed.
  virtual bool test_ended(Request& request) const noexcept = 0;
  // Tests several requests, and makes the complete ones null. Writes an entry of `completions` for
  // each, and returns their number. REQUIRES: at most kRequestsPerTest requests, and room for as
  // many entries in `completions`.
  virtual std::size_t test_some(std::span<Request> requests,
                                std::span<Completion> completions) const = 0;

  // Throws an error that names `call`, unless `code` is 0.
  virtual void check(int code, const char* call) const = 0;
  // Returns true if `code` means that a message was longer than the buffer of its receiver.
  virtual bool truncated(int code) const = 0;
};

// Detects the ABI of the library, and returns its implementation. Throws Error(kUnavailable) with
// the library's path if the library has neither ABI, or lacks a function.
std::unique_ptr<const Api> make_api(const SharedObject& library);

}  // namespace hbm::communicator::mpi
