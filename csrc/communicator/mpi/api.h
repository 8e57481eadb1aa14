// MPI as hbm calls it, whatever the ABI of the library: for each of the two (abi.h) there is one
// implementation (api.cpp), chosen when the library is loaded.
//
// Threads: once initialise() has returned and threads_multiple() is true, all may be called from
// any thread. Errors: unless said otherwise, Error(kNetwork) with the name of MPI's function and
// MPI's own text. After MPI_Finalize, which the user's program may call (mpi4py), MPI is not
// called: what communicates throws Error(kUnavailable), and all requests have ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace hbm::mpi {

// A handle holds what the library knows the object by. Zero, which no object has in either ABI,
// stands for the null handle.
struct CommHandle {
  std::uintptr_t value = 0;
};
struct Request {
  std::uintptr_t value = 0;
  explicit operator bool() const noexcept { return value != 0; }
};

// A request that is complete: its place among those asked for, and MPI's error code, 0 for none.
struct Completion {
  int index = 0;
  int error = 0;
};

// A library that the process has loaded.
struct SharedObject {
  void* handle = nullptr;  // dlopen's
  std::string path;
};

class Api {
 public:
  virtual ~Api() = default;

  // These four may be called at any time. The library's name and version, and its ABI's name:
  virtual std::string version() const = 0;
  virtual std::string abi() const = 0;
  virtual bool initialised() const = 0;
  virtual bool finalised() const = 0;

  // MPI_Init_thread; asks for MPI_THREAD_MULTIPLE.
  virtual void initialise() const = 0;
  virtual bool threads_multiple() const = 0;
  virtual void finalise() const noexcept = 0;

  // The world. After return_errors(), functions of MPI return an error code and do not abort.
  virtual void return_errors() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Gives every rank what rank 0 has there.
  virtual void broadcast(void* data, std::size_t bytes) const = 0;
  virtual Request barrier() const = 0;

  // A communicator of the given world ranks, in that order; only they call.
  virtual CommHandle create(const std::vector<int>& world_ranks, int tag) const = 0;
  virtual void free(CommHandle comm) const noexcept = 0;
  virtual int highest_tag(CommHandle comm) const = 0;

  // The data must stay where it is until the request is complete.
  virtual Request isend(const void* data, std::size_t bytes, int peer, int tag,
                        CommHandle comm) const = 0;
  // `bytes` is the most that may arrive.
  virtual Request irecv(void* data, std::size_t bytes, int peer, int tag,
                        CommHandle comm) const = 0;
  // Receives a message that is there already, from whichever rank, and sets `peer`; null if there
  // is none.
  virtual Request irecv_any(void* data, std::size_t bytes, int tag, CommHandle comm,
                            int& peer) const = 0;
  // Asks MPI to give up a receive, which still has to be completed.
  virtual void cancel(Request request) const noexcept = 0;

  // Whether the request is complete; it is null then. An error names `call`, which started it.
  virtual bool test(Request& request, const char* call) const = 0;
  // The same; also true if it has ended by an error.
  virtual bool test_ended(Request& request) const noexcept = 0;
  // Makes null those that are complete, and says which they are: returns how many entries of
  // `completions` it has written. REQUIRES: at most kRequestsPerTest requests, as many completions.
  virtual std::size_t test_some(std::span<Request> requests,
                                std::span<Completion> completions) const = 0;

  // Throws unless `code` is 0.
  virtual void check(int code, const char* call) const = 0;
  // Whether `code` says that a message was longer than its receiver had room for.
  virtual bool truncated(int code) const = 0;
};

// Which ABI the library has is found out here. Throws Error(kUnavailable), naming what was found
// and what would do, if it has neither or lacks a function.
std::unique_ptr<const Api> make_api(const SharedObject& library);

}  // namespace hbm::mpi
