// Python's lock, which a thread may hold while it drops an object.
//
// Threads: any thread may call every function.
#pragma once

#include <functional>

namespace hbm::process_group {

// Calls `call` without Python's lock: if the calling thread holds the lock, releases it for the
// call. For destructors that wait for other threads, which may need the lock to end.
void without_python_lock(const std::function<void()>& call);

// Installs the function that releases the lock for a call. Until then, no thread holds the lock.
// The module calls this once, when it is loaded.
using UnlockedCall = void (*)(const std::function<void()>& call);
void set_unlocked_call(UnlockedCall unlocked) noexcept;

}  // namespace hbm::process_group
