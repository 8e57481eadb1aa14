#include "process_group/group_resource.h"

#include <mutex>
#include <utility>

#include "bootstrap/gather.h"
#include "pg_hbm.h"
#include "process_group/types.h"

namespace hbm {

std::vector<std::string> ProcessGroupHbm::gather(const std::string& step,
                                                 const std::function<std::string()>& tell) {
  const bootstrap::Party party{
      store_, prefix_, rank_,
      size_,  name_,   Clock::now() + std::chrono::milliseconds(timeout_ms_.load())};
  return translated(
      [&] { return bootstrap::gather(party, step, bootstrap::everyone(size_), tell); });
}

std::vector<std::string> ProcessGroupHbm::networks() const {
  std::vector<std::string> networks;
  for (const bootstrap::Member& member : members_) {
    networks.push_back(member.boot_id + "/" + member.network_namespace + "/" + member.forced_node);
  }
  return networks;
}

void ProcessGroupHbm::attach(std::shared_ptr<Companion> companion) {
  std::unique_lock lock(companion_mutex_);
  companion_ = companion;
  const bool ended = ended_;
  lock.unlock();
  if (ended) companion->close(/*patient=*/false);
}

std::shared_ptr<Companion> ProcessGroupHbm::companion() const {
  const std::lock_guard lock(companion_mutex_);
  return companion_;
}

// What a forked child has inherited is its parent's to close.
void ProcessGroupHbm::close_companion(bool patient) {
  if (collectives_->in_forked_child()) return;
  std::unique_lock lock(companion_mutex_);
  const std::shared_ptr<Companion> companion = std::exchange(ended_, true) ? nullptr : companion_;
  lock.unlock();
  if (companion) companion->close(patient);
}

}  // namespace hbm
