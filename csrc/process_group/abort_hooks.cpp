#include "process_group/abort_hooks.h"

#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace hbm::process_group {

void AbortHooks::add(int64_t id, Hook hook) {
  const std::lock_guard lock(mutex_);
  if (!hooks_.try_emplace(id, std::move(hook)).second) {
    throw Error(ErrorKind::kInvalid, "an abort hook with the id " + std::to_string(id) +
                                         " is registered already; unregister it first");
  }
}

void AbortHooks::remove(int64_t id) {
  const std::lock_guard lock(mutex_);
  hooks_.erase(id);
}

void AbortHooks::rearm() {
  const std::lock_guard lock(mutex_);
  has_run_ = false;
}

void AbortHooks::run(const std::string& group) noexcept {
  std::map<int64_t, Hook> hooks;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(has_run_, true)) return;
    hooks = hooks_;
  }
  for (const auto& [id, hook] : hooks) {
    try {
      hook();
    } catch (const std::exception& error) {
      log::error("the abort hook " + std::to_string(id) + " of " + group +
                 " raised an exception: " + error.what());
    } catch (...) {
      log::error("the abort hook " + std::to_string(id) + " of " + group +
                 " raised an unknown exception");
    }
  }
}

}  // namespace hbm::process_group
