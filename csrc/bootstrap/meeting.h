// The meeting of a future group's members, whose handles (bootstrap/handle.h) each of them has. The
// members meet in the store that the first member serves for its handle.
//
// Threads: one thread of each member uses the object.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "bootstrap/gather.h"
#include "bootstrap/handle.h"
#include "bootstrap/key_value.h"

namespace hbm::bootstrap {

class Meeting {
 public:
  // `store`: the store of the first member's handle. `uuid`: the number of the attempt, equal on
  // all members. No earlier attempt had it. `group`: as errors name it.
  Meeting(Roster roster, int64_t uuid, std::shared_ptr<KeyValue> store, const std::string& group,
          KeyValue::Deadline deadline);

  // Returns once all members have come with the same handles. Throws Error(kMismatch) if members
  // came with different handles, Error(kDeath) naming a member that has died, Error(kTimeout)
  // naming the members that have not come. A member that fails or finds a death notifies the
  // others, which then throw Error(kUnavailable) with its text.
  void meet();

  // Returns once all members have formed the group and called this. Throws as meet() does. A member
  // that cannot form the group calls fail() instead. So the group is formed for all members or for
  // none, unless the first member, which serves the store, dies during this call.
  void conclude();

  // Notifies the other members that this one cannot form the group. Waits 200 ms at most.
  void fail(const std::string& why) noexcept;

  // Returns the prefix of the group's own keys in the store.
  std::string prefix() const;

  const Roster& roster() const { return roster_; }

 private:
  void gather_all(const char* step);

  const Roster roster_;
  const int64_t uuid_;
  Participant participant_;
};

}  // namespace hbm::bootstrap
