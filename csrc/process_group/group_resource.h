// What is set up beside a group and ends with it.
#pragma once

namespace hbm {

class GroupResource {
 public:
  virtual ~GroupResource() = default;

  // The group has ended: this rank takes part in nothing more. Called once, with no lock held, from
  // any thread. `patient`: by destroy_process_group, so that what other ranks still need may stay
  // until they are done; else the group was aborted, or is being destroyed without a word.
  // May throw, which destroy_process_group passes on.
  virtual void close(bool patient) = 0;
};

}  // namespace hbm
