// A window of a group: memory of every rank into which the other ranks write. A rank puts data into
// the memory of another rank, its *target*, and then signals the target. The target takes no part
// in either. Before it reads the data, it waits for the signal.
//
// Life: each rank makes its part of the window (Communicator::make_window()). The ranks exchange
// their parts, and each calls connect(). To end the window, each rank runs drain(), the ranks
// agree that all have done so, and each calls close(). Ranks that end their use of the window at
// different times call release() instead, and each calls close() once released() returns true. A
// window that is destroyed without close() leaks its counts of signals, because other ranks may
// still signal.
//
// Order: the puts and signals of one rank to one target in one window take effect in the order in
// which they began. A rank that has taken a signal sees all data that the signalling rank put into
// the window before it. A put does not signal.
//
// Lost puts: if a put is abandoned after its begin(), the target lacks data that a later signal
// would announce. So all later puts and signals of this rank to the target throw, until the ranks
// make another window. An operation whose begin() threw loses nothing. Nor does a signal that is
// abandoned.
//
// Channels: each signal has a channel. A wait on one channel takes no signal of another.
//
// Ownership: the window keeps the shared memory mapped. It does not keep this rank's own data,
// which must stay valid until close(). Operations keep the window.
//
// Threads: any thread may call every member. No thread waits in a member.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "communicator/communicator.h"

namespace hbm::communicator {

inline constexpr int kSignalChannels = 32;  // PyTorch's symmetric memory for CUDA has 32

// One rank's part of a window, as the other ranks find it: offsets in the rank's segment.
struct WindowPart {
  uint64_t data = 0;
  uint64_t bytes = 0;    // of the data
  uint64_t signals = 0;  // the counts of the signals that each rank has sent to this rank
};

class SharedWindow {
 public:
  virtual ~SharedWindow() = default;

  // Returns this rank's part.
  virtual const WindowPart& part() const noexcept = 0;

  // Takes the parts of all ranks, by rank. Called once, before the members below. Throws
  // Error(kMismatch) if a part is not inside its rank's segment.
  virtual void connect(const std::vector<WindowPart>& parts) = 0;

  // Returns the address of a rank's data in this process.
  virtual std::byte* data(int rank) const noexcept = 0;

  // Make an operation on rank `to`, which may be this rank. The operation is done when it has taken
  // effect. Its begin() throws Error(kInvalid) after the begin() of a drain(). If rank `to` has
  // died or left, or the group has failed, its poll() throws Error(kDeath) or Error(kPeer). If an
  // earlier put to rank `to` was lost, its poll() throws Error(kAborted), which describes that put.
  // An operation that throws has no effect. An abandoned put may have copied a part of its data,
  // and copies no more.
  //
  // put(): copies `in` to the rank's data, from byte `offset` on. REQUIRES: the data end within the
  // part, and do not overlap with `in`.
  virtual OperationPtr put(Source in, Dtype dtype, int to, size_t offset) = 0;
  // signal(): adds one signal for the rank. REQUIRES: 0 <= `channel` < kSignalChannels.
  virtual OperationPtr signal(int to, int channel) = 0;

  // Makes an operation that takes one signal of rank `from`, and waits until there is one. Signals
  // that no operation has taken stay. begin() throws Error(kInvalid) after the begin() of a
  // drain(). REQUIRES: 0 <= `channel` < kSignalChannels.
  virtual OperationPtr wait_signal(int from, int channel) = 0;

  // Makes an operation that is done when all puts and signals of this rank that began before it
  // have ended. Its begin() closes the window to further operations.
  virtual OperationPtr drain() = 0;

  // Returns the number of wait_signal() operations that have begun and have not ended.
  virtual size_t waits() const = 0;

  // Opens the window again, if the ranks did not agree to end it.
  virtual void reopen() = 0;

  // Closes the window to further operations, and tells all ranks that this rank no longer uses it.
  // Returns false while operations of this rank have not ended: call release() again. After a call
  // that returned true, another has no effect. REQUIRES: connect() was called; this rank accesses
  // no rank's data any more.
  virtual bool release() = 0;

  // Returns true if all ranks have released the window. All their accesses to this rank's data
  // happened before.
  virtual bool released() const = 0;

  // Frees the counts of signals. REQUIRES: no rank uses the window any more; or connect() was
  // called on no rank.
  virtual void close() = 0;
};

}  // namespace hbm::communicator
