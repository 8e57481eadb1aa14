#include "base/close_in_children.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>

#include "base/tuning.h"

namespace hbm {
namespace {

using Entries = std::array<std::atomic<int>, kDescriptorsClosedInChildren>;

// Never destroyed: other threads may fork at exit.
Entries& entries() {
  static Entries* const all = [] {
    auto* const made = new Entries;
    for (auto& entry : *made) entry.store(-1);
    return made;
  }();
  return *all;
}

void close_all() {
  for (auto& entry : entries()) {
    const int descriptor = entry.exchange(-1);
    if (descriptor >= 0) ::close(descriptor);
  }
}

}  // namespace

void close_in_children(int descriptor) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, &close_all); });
  for (auto& entry : entries()) {
    int none = -1;
    if (entry.compare_exchange_strong(none, descriptor)) return;
  }
}

void keep_in_children(int descriptor) noexcept {
  for (auto& entry : entries()) {
    int ours = descriptor;
    if (entry.compare_exchange_strong(ours, -1)) return;
  }
}

}  // namespace hbm
