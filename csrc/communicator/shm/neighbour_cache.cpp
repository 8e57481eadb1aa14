#include "communicator/shm/neighbour_cache.h"

#include <map>
#include <mutex>

#include "base/fork.h"

namespace hbm::shm {
namespace {

struct Cache {
  std::mutex mutex;  // guards what follows
  std::map<std::string, std::weak_ptr<const Neighbour>> neighbours;
};

}  // namespace

std::string neighbour_key(const bootstrap::Member& member) {
  return member.process + "." + member.segment;
}

std::shared_ptr<const Neighbour> known_neighbour(const std::string& key) {
  auto& cache = per_process<Cache>();
  const std::lock_guard lock(cache.mutex);
  const auto found = cache.neighbours.find(key);
  return found == cache.neighbours.end() ? nullptr : found->second.lock();
}

void remember_neighbour(const std::string& key, const std::shared_ptr<const Neighbour>& neighbour) {
  auto& cache = per_process<Cache>();
  const std::lock_guard lock(cache.mutex);
  std::erase_if(cache.neighbours, [](const auto& entry) { return entry.second.expired(); });
  cache.neighbours[key] = neighbour;
}

}  // namespace hbm::shm
