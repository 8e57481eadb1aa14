// The functions that a program has registered to be called when its group fails or is aborted.
//
// Threads: any thread may call every member. No lock is held while a hook runs.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace hbm::process_group {

class AbortHooks {
 public:
  using Hook = std::function<void()>;

  // Throws Error(kInvalid) if a hook has this id.
  void add(int64_t id, Hook hook);

  // Does nothing if no hook has this id.
  void remove(int64_t id);

  // Calls each hook, in the order of the ids, unless run() was called since the last rearm(). Logs
  // an exception of a hook as an error of `group`, and continues.
  void run(const std::string& group) noexcept;

  // Lets the next run() call the hooks again.
  void rearm();

 private:
  std::mutex mutex_;  // guards the members below
  std::map<int64_t, Hook> hooks_;
  bool has_run_ = false;
};

}  // namespace hbm::process_group
