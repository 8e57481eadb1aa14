#include "process_group/group_resource.h"

#include <mutex>
#include <utility>

#include "bootstrap/gather.h"
#include "pg_hbm.h"
#include "process_group/types.h"

namespace hbm {

std::vector<std::string> ProcessGroupHbm::gather(const std::string& step,
                                                 const std::function<std::string()>& tell) {
  const bootstrap::Participant participant{
      store_, prefix_, rank_,
      size_,  name_,   Clock::now() + std::chrono::milliseconds(timeout_ms_.load())};
  return translated(
      [&] { return bootstrap::gather(participant, step, bootstrap::everyone(size_), tell); });
}

std::vector<std::string> ProcessGroupHbm::networks() const {
  std::vector<std::string> networks;
  for (const bootstrap::Member& member : members_) {
    networks.push_back(member.boot_id + "/" + member.network_namespace + "/" + member.forced_node);
  }
  return networks;
}

void ProcessGroupHbm::attach(std::shared_ptr<GroupResource> resource) {
  std::unique_lock lock(resource_mutex_);
  resource_ = resource;
  const bool ended = ended_;
  lock.unlock();
  if (ended) resource->close(/*patient=*/false);
}

std::shared_ptr<GroupResource> ProcessGroupHbm::resource() const {
  const std::lock_guard lock(resource_mutex_);
  return resource_;
}

// What a forked child has inherited is its parent's to close.
void ProcessGroupHbm::close_resource(bool patient) {
  if (collectives_->in_forked_child()) return;
  std::unique_lock lock(resource_mutex_);
  const std::shared_ptr<GroupResource> resource = std::exchange(ended_, true) ? nullptr : resource_;
  lock.unlock();
  if (resource) resource->close(patient);
}

}  // namespace hbm
