// A carrier moves messages between ranks: MPI (mpi/api.h), or TCP connections (tcp/links.h).
// tests/native/carrier_conformance_test.cpp tests every carrier.
//
// Matching: a message matches a receive of its communicator, tag and sender. Messages of one sender
// with equal communicator and tag match receives in the order in which they were sent. A receive
// does not learn the length of its message. A message that is longer than the buffer fails the
// receive with a code for which truncated() returns true, and the buffer has undefined contents.
//
// Progress: no call waits, except free() over MPI. Messages move only while this process calls the
// carrier: a rank that waits tests its requests again and again. A message without a receive is no
// obstacle to other messages.
//
// Memory: the caller keeps the data of a send and the buffer of a receive until test(),
// test_ended() or test_some() has reported the end of the request. This also holds for cancelled
// receives and withdrawn sends. Afterwards the carrier accesses the memory no more.
//
// Failures: TCP links fail the requests of a peer whose connection has ended. MPI does not notice
// the death of a peer, and the requests stay pending. The failure detector (failure/) finds the
// dead rank in both cases, and the operation then cancels its requests.
//
// Threads: any thread may call every member, unless a comment of the implementation says otherwise.
// One thread at a time uses a request.
//
// Errors: unless a comment says otherwise, a call that fails throws Error(kNetwork) with the cause.
// Once finalised() returns true, calls throw Error(kUnavailable).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hbm::communicator {

// The carrier's value of a handle. Zero is the null handle.
struct CommHandle {
  std::uintptr_t value = 0;
};
struct Request {
  std::uintptr_t value = 0;
  explicit operator bool() const noexcept { return value != 0; }
};

// A complete request: its index among the tested requests, and the carrier's error code; 0: no
// error.
struct Completion {
  int index = 0;
  int error = 0;
};

class Carrier {
 public:
  virtual ~Carrier() = default;

  // Returns true if the carrier cannot be used any more in this process.
  virtual bool finalised() const = 0;

  virtual void free(CommHandle comm) const noexcept = 0;
  virtual int highest_tag(CommHandle comm) const = 0;

  // Starts a send. The data must not move or change until the request is complete. `peer`, also
  // below: a rank of the communicator.
  virtual Request isend(const void* data, std::size_t bytes, int peer, int tag,
                        CommHandle comm) const = 0;
  // Starts a receive of at most `bytes`.
  virtual Request irecv(void* data, std::size_t bytes, int peer, int tag,
                        CommHandle comm) const = 0;
  // Starts to receive a message that has arrived, from any rank, and sets `peer` to the sender.
  // Returns null if no message has arrived.
  virtual Request irecv_any(void* data, std::size_t bytes, int tag, CommHandle comm,
                            int& peer) const = 0;
  // Asks the carrier to cancel a receive. The receive must still be completed.
  virtual void cancel(Request request) const noexcept = 0;
  // Asks the carrier to access the data of a send no longer. The send must still be completed. Over
  // MPI, which cannot cancel a send, the call has no effect. It has none on a receive.
  virtual void withdraw(Request /*request*/) const noexcept {}

  // Returns true if the request is complete, and then makes `request` null. `call` is the function
  // of MPI that started the request, for errors of MPI.
  virtual bool test(Request& request, const char* call) const = 0;
  // Returns true if the request is complete or has failed.
  virtual bool test_ended(Request& request) const noexcept = 0;
  // Tests several requests, and makes the complete ones null. Writes an entry of `completions` for
  // each, and returns their number. Ignores null requests. REQUIRES: at most mpi::kRequestsPerTest
  // requests, and room for as many entries in `completions`.
  virtual std::size_t test_some(std::span<Request> requests,
                                std::span<Completion> completions) const = 0;

  // Throws an error, unless `code` is 0. `call`: as in test().
  virtual void check(int code, const char* call) const = 0;
  // Returns true if `code` means that a message was longer than the buffer of its receiver.
  virtual bool truncated(int code) const = 0;
};

}  // namespace hbm::communicator
