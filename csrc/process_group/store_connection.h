// The connection of this process to a c10d store, which all of its groups share.
//
// A thread of its own makes every call, one after another, so that a store that does not answer (a
// process that is stopped, a link that is cut) holds up nobody past a deadline; none of the calls
// waits in the store. Groups of one store have PrefixStores above it.
//
// While a group is being made, calls go over PyTorch's own connection, as PyTorch's own do then.
// Later ones go over a clone of a TCPStore, since other code may block the original; the first of
// them opens it and waits for it, as long as the original answers. So a job on one node mostly
// needs no second connection, of which each may hold up the whole store: PyTorch's looks up the
// name of who connects, and waits for a name server that is silent.
//
// Threads: all functions may be called from any thread, but for a forked child, which has to open a
// store of its own.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bootstrap/key_value.h"

namespace hbm {

// A group's way to its store.
struct GroupStore {
  std::shared_ptr<KeyValue> group;  // the group's own keys
  std::shared_ptr<KeyValue> job;    // all keys; one object for all groups of the store
  std::shared_ptr<void> making;     // let go when the group has been made
  StoreServer server = StoreServer::kNoRank;
};

// Returns without asking the store. A call throws StoreError(kNetwork) if the store is gone,
// StoreError(kTimeout) if it does not answer before the deadline.
GroupStore connect_store(const c10::intrusive_ptr<c10d::Store>& store);

// Returns the group's own keys, for a process that may be unable to start a thread. The caller's
// thread asks the store, and waits for its answer past any deadline.
std::shared_ptr<KeyValue> connect_directly(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace hbm
