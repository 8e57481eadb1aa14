#include "communicator/connect/oversubscription.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <limits>
#include <map>
#include <sstream>

#include "communicator/connect/tuning.h"
#include "communicator/shm/control_region.h"
#include "memory/control_group.h"

namespace hbm::communicator::connect {
namespace {

constexpr size_t kCpusOfADigit = 4;
constexpr char kDigits[] = "0123456789abcdef";

std::atomic<int> counted_ranks{1};  // the largest argument of count_group()

unsigned value_of(char digit) {
  const char text[] = {digit, '\0'};
  return static_cast<unsigned>(std::strtoul(text, nullptr, 16));
}

}  // namespace

std::string allowed_processors() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  // The call fails if the kernel has more processors than CPU_SETSIZE. Then the first processors
  // count as allowed: as many as are online, at most CPU_SETSIZE.
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    for (long cpu = 0; cpu < std::min<long>(sysconf(_SC_NPROCESSORS_ONLN), CPU_SETSIZE); ++cpu) {
      CPU_SET(static_cast<size_t>(cpu), &allowed);
    }
  }
  std::string mask;
  for (size_t first = 0; first < CPU_SETSIZE; first += kCpusOfADigit) {
    unsigned digit = 0;
    for (size_t i = 0; i < kCpusOfADigit; ++i) {
      if (CPU_ISSET(first + i, &allowed)) digit |= 1u << i;
    }
    mask += kDigits[digit];
  }
  return mask.substr(0, mask.find_last_not_of('0') + 1);
}

size_t count_processors(const std::vector<std::string>& masks) {
  std::vector<unsigned> all;
  for (const std::string& mask : masks) {
    all.resize(std::max(all.size(), mask.size()));
    for (size_t i = 0; i < mask.size(); ++i) all[i] |= value_of(mask[i]);
  }
  size_t count = 0;
  for (const unsigned digit : all) count += static_cast<size_t>(std::popcount(digit));
  return count;
}

std::string allowed_quota() {
  const memory::CoreQuota quota = memory::core_quota();
  if (quota.group == 0) return {};
  return std::to_string(quota.cores) + " " + std::to_string(quota.group);
}

size_t usable_processors(const std::vector<int>& ranks,
                         const std::vector<bootstrap::Member>& members) {
  std::vector<std::string> masks;
  std::map<std::string, size_t> quotas;  // by control group, whose ranks share the quota
  bool all_have_one = true;
  for (const int rank : ranks) {
    const bootstrap::Member& member = members[static_cast<size_t>(rank)];
    masks.push_back(member.processors);
    std::istringstream quota(member.quota);
    size_t cores = 0;
    std::string group;
    if (quota >> cores >> group) {
      quotas[group] = cores;
    } else {
      all_have_one = false;
    }
  }
  size_t processors = count_processors(masks);
  if (all_have_one) {
    size_t sum = 0;
    for (const auto& [group, cores] : quotas) sum += cores;
    processors = std::min(processors, sum);
  }
  return std::max<size_t>(1, processors);
}

int most_ranks() { return counted_ranks.load(); }

void count_group(int ranks) {
  int seen = counted_ranks.load();
  while (seen < ranks && !counted_ranks.compare_exchange_weak(seen, ranks)) {
  }
}

ProcessorDemand processor_demand(const std::vector<int>& local,
                                 const std::vector<bootstrap::Member>& members) {
  ProcessorDemand demand;
  demand.ranks = static_cast<int>(local.size());
  for (const int rank : local) {
    const bootstrap::Member& member = members[static_cast<size_t>(rank)];
    demand.ranks = std::max(demand.ranks, std::atoi(member.most_ranks.c_str()));
  }
  demand.processors = usable_processors(local, members);
  return demand;
}

uint64_t least_segment_bytes(const std::vector<int>& local,
                             const std::vector<bootstrap::Member>& members) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (const int rank : local) {
    least =
        std::min<uint64_t>(least, std::stoull(members[static_cast<size_t>(rank)].segment_bytes));
  }
  return least;
}

size_t shm_slot_chunk(uint64_t staging_bytes, uint64_t segment_bytes, bool oversubscribed) {
  const uint64_t most = std::min(staging_bytes / 2, segment_bytes / 8);
  const auto of_slots = [](size_t chunk) { return 2 * shm::RegionLayout(2, chunk).data_bytes; };
  size_t chunk = oversubscribed ? kOversubscribedSlotChunkBytes : kSlotChunkBytes;
  while (chunk > kLeastSlotChunkBytes && of_slots(chunk) > most) chunk /= 2;
  return chunk;
}

}  // namespace hbm::communicator::connect
