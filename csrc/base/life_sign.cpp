#include "base/life_sign.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <string>
#include <system_error>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "base/start_thread.h"
#include "base/threads.h"

namespace hbm {
namespace {

// The kernel reads the list when the keeper ends, perhaps in the middle of a change. So each change
// is one store of a link. New signs come first. So a change delays no mark of older signs, except
// of those behind a sign that is taken down and put up again at this moment.
class Signs {
 public:
  static Signs& here() { return per_process<Signs>(); }

  void put_up(LifeSign& sign) {
    const std::lock_guard lock(mutex_);
    start();
    signs_.push_back(&sign);
    sign.link.next = head_.list.next;
    sign.holder.store(keeper_, std::memory_order_release);
    link(head_.list, &sign.link);
  }

  void take_down(LifeSign& sign) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(signs_, &sign);
    if (found == signs_.end()) return;
    link(found + 1 == signs_.end() ? head_.list : (*(found + 1))->link, sign.link.next);
    sign.holder.store(0, std::memory_order_release);
    signs_.erase(found);
  }

 private:
  // Starts the keeper, once. REQUIRES: mutex_ is held.
  void start() {
    if (started_) return;
    started_ = true;
    try {
      const SignalsHeldOff held;
      start_thread([this] { keep(); }).detach();
    } catch (const std::system_error& error) {
      log::info(std::string("no thread for life signs can start: ") + error.what());
    }
  }

  // The body of the keeper. It replaces the C library's list of this thread, which is empty. The
  // thread uses nothing that is destroyed at the end of the process.
  void keep() noexcept {
    if (syscall(SYS_set_robust_list, &head_, sizeof(head_)) == 0) {
      const std::lock_guard lock(mutex_);
      keeper_ = static_cast<uint32_t>(syscall(SYS_gettid));
      for (LifeSign* const sign : signs_) sign->holder.store(keeper_, std::memory_order_release);
    }
    while (true) pause();
  }

  static void link(robust_list& from, robust_list* to) noexcept {
    std::atomic_ref<robust_list*>(from.next).store(to, std::memory_order_release);
  }

  std::mutex mutex_;              // guards the members below, against all but the kernel
  std::vector<LifeSign*> signs_;  // the list in reverse
  bool started_ = false;
  uint32_t keeper_ = 0;  // the keeper's thread id; 0: it does not keep the signs yet
  robust_list_head head_{{&head_.list}, offsetof(LifeSign, holder), nullptr};
};

}  // namespace

void put_up(LifeSign& sign) { Signs::here().put_up(sign); }

void take_down(LifeSign& sign) noexcept { Signs::here().take_down(sign); }

}  // namespace hbm
