// The connection of this process to a c10d store, shared by all of its groups.
//
// One thread makes the calls of all groups, one after another. A caller waits for this thread only
// until the caller's deadline, even if the store does not answer (a stopped process, a broken
// link). The thread never calls functions of the store that wait for a key. Groups whose
// PrefixStores are in the same store share the connection.
//
// While a group is being formed, calls go over PyTorch's own connection, as PyTorch's own calls do
// then. Later calls to a TCPStore go over a second connection, a clone, because other code may
// block the original. The first such call opens the clone and waits for it, as long as the original
// answers. A job on one node makes few such calls, and mostly needs no second connection. That is
// an advantage, because each connection can stall the whole store: PyTorch's server resolves the
// client's name, and blocks on a silent name server.
//
// A store that a member serves for its handle (process_group/handle_store.h) needs none of this:
// the caller's thread asks it.
//
// Threads: all functions may be called from any thread. A forked child must open its own store.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bootstrap/key_value.h"

namespace hbm::process_group {

// A group's access to its store.
struct GroupStore {
  std::shared_ptr<bootstrap::KeyValue> group;  // the keys of the group
  // All keys; the same object for all groups of the store.
  std::shared_ptr<bootstrap::KeyValue> job;
  std::shared_ptr<void> forming;  // released when the group is formed
  bootstrap::StoreServer server = bootstrap::StoreServer::kNoRank;
  bool by_handle = false;  // only processes with the handle of a member can ask it
};

// Returns the access to `store`, without asking the store. Functions of the result throw
// StoreError(kNetwork) if the store is gone, StoreError(kTimeout) if it does not answer before the
// deadline, Error(kAborted) if the process ends. (With a member's store, the thread is parked at
// the end of the process.)
GroupStore connect_store(const c10::intrusive_ptr<c10d::Store>& store);

// Returns the prefix that the store puts before the keys of the group.
std::string key_prefix(const c10::intrusive_ptr<c10d::Store>& store);

// Returns the keys of the group, for a process that may be unable to start a thread. The caller's
// thread asks the store, and waits for answers without a deadline.
std::shared_ptr<bootstrap::KeyValue> connect_directly(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace hbm::process_group
