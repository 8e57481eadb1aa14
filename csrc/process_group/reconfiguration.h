// The way of a process from one group to the next: its handle, and the meetings with other members.
// ProcessGroupHbm::reconfigure() uses it, and torch_hbmcomm.reconfigure() for releases of PyTorch
// without that function.
//
// Threads: any thread may call every member of Reconfiguration. One thread uses a NextGroup.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "bootstrap/key_value.h"
#include "bootstrap/meeting.h"
#include "process_group/handle_store.h"
#include "process_group/store_connection.h"

namespace hbm::process_group {

// A group whose members have met. They form it in `store`, and then call conclude().
struct NextGroup {
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<bootstrap::Meeting> meeting;
  GroupStore keys;  // keeps the connection that the meeting uses

  int rank() const { return meeting->roster().rank; }
  int size() const { return meeting->roster().size(); }
};

class Reconfiguration {
 public:
  // Returns this process' handle for the next group. Serves a store for it from the first call on.
  // Once the group of that handle is formed, the store ends with the group, or soon, if another
  // member serves the group's. Throws as HandleStore().
  std::string handle();

  // Returns when all members of the next group have come. `handles`, `ordered`: as for
  // bootstrap::make_roster(). `uuid` numbers the attempt. `group`: as errors name it. Throws
  // Error(kUnavailable) if `uuid` was used before, and as make_roster(), open_store() and
  // bootstrap::Meeting::meet().
  NextGroup meet(const std::vector<std::string>& handles, bool ordered, int64_t uuid,
                 const std::string& group, bootstrap::KeyValue::Deadline deadline);

  // Returns when all members have formed the group (bootstrap::Meeting::conclude()). The handle is
  // then spent, and handle() returns another one.
  void conclude(const NextGroup& next);

 private:
  std::shared_ptr<HandleStore> present();
  bool is_new(int64_t uuid);

  std::mutex mutex_;                      // guards the members below; not held during a wait
  std::shared_ptr<HandleStore> present_;  // null: handle() makes it
  // Stores in which groups of this process have met, if this process serves them, each with the
  // time at which it ends. Members of an earlier group release its store soon after they have
  // formed the next one. Until then they may read in it why their group has ended.
  std::deque<std::pair<bootstrap::KeyValue::Deadline, std::shared_ptr<HandleStore>>> served_;
  std::set<int64_t> uuids_;  // of this process' attempts
};

}  // namespace hbm::process_group
