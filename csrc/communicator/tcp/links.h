// Messages over TCP links: one connection to each other rank of a group. The carrier of a group
// whose ranks share no MPI world.
//
// Matching: a message matches the oldest receive of its sender, communicator and tag. Without one,
// it waits for a receive. All messages of one sender come over one connection, in the order of
// sending.
//
// Frames: each has a FrameHeader, and then as many bytes as its kind says. A message of up to
// kEagerBytes is one frame, kEager. The receiver keeps its bytes until a receive matches it. For a
// longer message the sender sends kRequest. When a receive has matched it, the receiver answers
// kClear, and the sender sends the bytes in a frame kData, straight into the receive's buffer. If
// the buffer is too small, the receiver answers kDiscard instead. If the sender has withdrawn the
// message before that, it answers kWithdrawn, and the receive fails. So a long message without a
// receive takes no memory at the receiver.
//
// Progress: every test (test(), test_ended(), test_some()) and irecv_any() reads the
// data that have arrived on all links, and writes as much unsent data as the kernel takes. isend()
// writes too. No call waits.
// A complete send is in the kernel: it arrives also if this object is destroyed.
//
// Failures: a link ends when its peer closes it, ends, or sends a malformed frame. Then all pending
// requests with this peer fail, and later ones too. But a receive may still match a message that
// arrived whole before. irecv_any() never fails because a peer is gone. The peer's death is not
// detected here; see communicator/failure/.
//
// Sleep: the epoll descriptor poll() is readable while a link has something to read, and while a
// link with unsent data can take more.
//
// Threads: any thread may call every member. One mutex guards all variable data.
// Calls hold it while they read and write, and take no other lock. Destroy the object when no
// thread uses it. A forked child closes its copies of the sockets, and must only destroy its
// object.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "communicator/carrier.h"

namespace hbm::communicator::tcp {

enum class FrameKind : uint8_t {
  kEager = 1,  // `bytes` follow
  kRequest,    // the message has `bytes`; `id` is the sender's number of the message
  kClear,      // answers kRequest `id`
  kDiscard,    // answers kRequest `id`
  kData,       // `bytes` follow; answers kClear `id`
  kWithdrawn,  // answers kClear `id`
};

// In the byte order of the sender. A rank with another byte order has another magic.
struct FrameHeader {
  uint32_t magic = 0;  // kFrameMagic
  FrameKind kind{};
  uint8_t communicator = 0;  // 1 or 2
  uint16_t unused = 0;
  int32_t tag = 0;
  uint32_t unused_too = 0;
  uint64_t bytes = 0;
  uint64_t id = 0;
};
static_assert(sizeof(FrameHeader) == 32);

inline constexpr uint32_t kFrameMagic = 0x6d626831;

class Links final : public Carrier {
 public:
  // `sockets`: by group rank, connected to that rank; none for this rank. `group`: as errors name
  // it. Throws Error(kUnavailable) if the kernel gives no epoll descriptor.
  Links(std::vector<Descriptor> sockets, std::string group);
  // Closes the sockets.
  ~Links() override;
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // Returns the group's communicator on the first call, and another one on the second. `ranks`: the
  // group rank of each rank of the communicator. The members of a communicator make it with the
  // same call. REQUIRES: at most two calls.
  CommHandle communicator(std::vector<int> ranks);

  // Returns the epoll descriptor, which this object owns.
  int poll() const noexcept;

  bool finalised() const override { return false; }
  void free(CommHandle /*comm*/) const noexcept override {}
  int highest_tag(CommHandle comm) const override;
  Request isend(const void* data, size_t bytes, int peer, int tag, CommHandle comm) const override;
  Request irecv(void* data, size_t bytes, int peer, int tag, CommHandle comm) const override;
  Request irecv_any(void* data, size_t bytes, int tag, CommHandle comm, int& peer) const override;
  // The buffer is not accessed any more.
  void cancel(Request request) const noexcept override;
  // Copies the unsent rest of a message that is being sent. Sends no other message any more.
  void withdraw(Request request) const noexcept override;
  bool test(Request& request, const char* call) const override;
  bool test_ended(Request& request) const noexcept override;
  size_t test_some(std::span<Request> requests, std::span<Completion> completions) const override;
  void check(int code, const char* call) const override;
  bool truncated(int code) const override;

 private:
  class Engine;
  const std::unique_ptr<Engine> engine_;
};

}  // namespace hbm::communicator::tcp
