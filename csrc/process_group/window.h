// c10d's windows, for a group whose ranks share memory (communicator/shared_window.h). PyTorch has
// them from release 2.14 on.
//
// tensor_register() and tensor_deregister() are collectives of the group: every rank calls them, in
// the order of its other collectives. If a rank refuses, or if the ranks' calls differ (another
// function, or another window), all ranks throw, and nothing has changed. put(), signal() and
// wait_signal() are operations of one rank, on the queue of messages. A put does not signal. The
// puts and signals of one rank to one other rank in one window take effect in the order of issue.
// If a put does not end well, later ones are refused (communicator/shared_window.h).
//
// Ownership: with `owning`, the window keeps the storage of the registered tensor until
// tensor_deregister(). If the window is destroyed before that, or if tensor_register() fails on
// some ranks, other ranks may still write to the tensor. Then the storage stays until the process
// ends. The caller does not resize the storage while it is registered. Without `owning`, the caller
// keeps the tensor's memory until tensor_deregister() has returned on all ranks. The window keeps
// its group.
//
// Errors: bad arguments throw Error(kInvalid) or Error(kUnsupported), and a group that has failed
// Error(kAborted), before anything moves. Ranks whose calls differ throw Error(kMismatch). With
// `async` false, a function throws the error of its operation, and Error(kInvalid) within a batch;
// else the Work has the error. Ctrl-C ends the wait of such a function, and its operation
// continues. All errors are PyTorch's (process_group/types.h).
//
// Threads: any thread may call every member. While a thread is in tensor_register() or
// tensor_deregister(), these throw Error(kInvalid) on other threads. The thread that drops the last
// reference may hold Python's lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "communicator/shared_window.h"
#include "pg_hbm.h"
#include "process_group/torch_version.h"

namespace hbm::process_group {

class WindowHbm final : public Window {
 public:
  // A window of the current members of `group`. REQUIRES: these share memory.
  // `number` counts the windows that the group has made; ranks compare it.
  WindowHbm(c10::intrusive_ptr<ProcessGroupHbm> group, uint64_t number);
  ~WindowHbm() override;

  // The tensor is contiguous, on the CPU, and in the group's segment. Each rank may register a
  // tensor of another size and type.
  void tensor_register(const at::Tensor& tensor, bool owning) override;
  // Waits for the puts and signals of this rank. Refuses if a wait_signal() has not ended.
  void tensor_deregister() override;

  // Copies `tensor`, which is on the CPU, to the tensor of rank `to`, from element `offset` on.
  // Both have one type.
  c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t to, int64_t offset,
                                     bool async, const PutOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> signal(int64_t to, bool async, const SignalOptions& opts) override;
  // Takes one signal of rank `from`.
  c10::intrusive_ptr<c10d::Work> wait_signal(int64_t from, bool async,
                                             const WaitSignalOptions& opts) override;
  // Do the same as signal() and wait_signal(), which use channel 0. Throw Error(kInvalid) if there
  // is no such channel.
  c10::intrusive_ptr<c10d::Work> signal_on(int64_t to, int channel, bool async,
                                           std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Work> wait_signal_on(int64_t from, int channel, bool async,
                                                std::chrono::milliseconds timeout);

  // Returns the registered tensor of a rank, in place. For another rank, the result must not be
  // used after tensor_deregister(); its memory stays mapped.
  at::Tensor map_remote_tensor(int64_t rank) override;
  // Returns UNIFIED: the ranks share one copy of the memory.
  WindowAttr get_attr(int64_t rank) override;

  const c10::intrusive_ptr<ProcessGroupHbm>& group() const noexcept { return group_; }
  // Returns true if the group still has the members that the window was made for.
  bool current() const;
  // Returns the window of the registered tensor.
  std::shared_ptr<communicator::SharedWindow> shared() const;
  // Throws Error(kInvalid) if this thread has begun a batch.
  void require_no_batch(const char* operation) const;

 private:
  // The call of a rank, which it announces to the other ranks in a collective of the window.
  struct Announcement;
  class Change;
  // The registered tensor of a rank.
  struct Place {
    at::ScalarType type;
    std::vector<int64_t> sizes;
    int64_t count;  // elements
  };
  struct Registration {
    std::shared_ptr<communicator::SharedWindow> window;
    // A tensor of its own with the storage of this rank's tensor, if the window owns that.
    at::Tensor tensor;
    std::vector<Place> places;
  };
  using RegistrationPtr = std::shared_ptr<const Registration>;

  void require_group(const char* operation) const;
  RegistrationPtr registered(const char* operation) const;
  std::shared_ptr<communicator::SharedWindow> make_part(const at::Tensor& tensor) const;
  void check_put(const at::Tensor& tensor, int to, int64_t offset,
                 const Registration& registration) const;
  static void connect(const std::vector<Announcement>& all, Registration& made);
  std::exception_ptr drain(communicator::SharedWindow& window) const;
  std::vector<Announcement> announce(Announcement own, const std::exception_ptr& refusal) const;
  void require_agreement(const char* operation, const std::vector<Announcement>& all,
                         const std::exception_ptr& refusal) const;

  c10::intrusive_ptr<ProcessGroupHbm> group_;
  // The communicator of the members that the window is for; reconfigure() gives the group another.
  const std::shared_ptr<communicator::Communicator> communicator_;

  const uint64_t number_;

  // Guards the next two members. No tensor is copied or dropped under it.
  mutable std::mutex mutex_;
  RegistrationPtr registration_;  // null: no tensor is registered
  bool changing_ = false;         // a thread is in a Change, the only place that replaces it
};

}  // namespace hbm::process_group
