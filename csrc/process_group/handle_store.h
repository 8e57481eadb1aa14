// The stores of handles (bootstrap/handle.h). Each process that gives its handle to others serves a
// TCPStore of PyTorch's. The members of the next group meet in the store of the first of them,
// which is then also the store of that group.
//
// Threads: an object is used by one thread at a time. Any thread may call open_store().
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bootstrap/handle.h"
#include "bootstrap/key_value.h"

namespace hbm::process_group {

class HandleStore {
 public:
  // Starts to serve a store on all interfaces of this machine, at a port that the kernel chooses.
  // Throws Error(kUnavailable) if that is impossible.
  HandleStore();

  const bootstrap::Handle& handle() const noexcept { return handle_; }

  // Ends with its last reference.
  const c10::intrusive_ptr<c10d::Store>& store() const noexcept { return store_; }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  bootstrap::Handle handle_;
};

// Connects to the store of another process' handle, at the first of its addresses that leads there.
// Throws Error(kDeath) if that process has ended on this machine, Error(kNetwork) if no address
// leads to the store, and Error(kTimeout) at the deadline. `what` begins the texts.
c10::intrusive_ptr<c10d::Store> open_store(const bootstrap::Handle& handle, const std::string& what,
                                           bootstrap::KeyValue::Deadline deadline);

}  // namespace hbm::process_group
