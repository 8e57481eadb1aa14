#include "bootstrap/meeting.h"

#include <poll.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/log.h"
#include "bootstrap/rank_watch.h"
#include "bootstrap/rendezvous.h"

namespace hbm::bootstrap {
namespace {

std::string member_name(const Roster& roster, int rank) {
  return std::to_string(rank) + " (" +
         process_name(roster.handles[static_cast<size_t>(rank)].process) + ")";
}

// Detects the deaths of the members whose processes this process can see.
class HandleWatch final : public RankWatch {
 public:
  HandleWatch(const Roster& roster, std::string group)
      : roster_(roster), group_(std::move(group)), processes_(roster.handles.size()) {}

  void met(int /*rank*/, const Member& /*member*/) override {}
  void await_sight(KeyValue::Deadline /*deadline*/) override {}

  void check(const std::vector<int>& ranks) override {
    std::vector<pollfd> ends;
    std::vector<int> watched, ended;
    for (const int rank : ranks) {
      Descriptor& process = processes_[static_cast<size_t>(rank)];
      bool has_ended = false;
      if (!process)
        process = open_process(roster_.handles[static_cast<size_t>(rank)].process, &has_ended);
      if (has_ended) ended.push_back(rank);
      if (!process) continue;
      ends.push_back({process.get(), POLLIN, 0});
      watched.push_back(rank);
    }
    if (!ends.empty()) poll(ends.data(), ends.size(), 0);
    for (size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].revents != 0) ended.push_back(watched[i]);
    }
    std::ranges::sort(ended);
    std::string dead;
    for (const int rank : ended) {
      dead += (dead.empty() ? "rank " : ", rank ") + member_name(roster_, rank) + " has died";
    }
    if (!dead.empty()) throw Error(ErrorKind::kDeath, group_ + " cannot be formed: " + dead);
  }

  std::string deaths() override { return {}; }

 private:
  const Roster& roster_;
  const std::string group_;
  std::vector<Descriptor> processes_;  // by rank; of those that check() could open
};

}  // namespace

Meeting::Meeting(Roster roster, int64_t uuid, std::shared_ptr<KeyValue> store,
                 const std::string& group, KeyValue::Deadline deadline)
    : roster_(std::move(roster)),
      uuid_(uuid),
      participant_{.store = std::move(store),
                   .prefix = "hbm/meeting/" + std::to_string(uuid) + "/",
                   .rank = roster_.rank,
                   .size = roster_.size(),
                   .group = group,
                   .deadline = deadline,
                   .watch = std::make_shared<HandleWatch>(roster_, group),
                   .advice =
                       "Did they come, with the same handles in the same order, and the same "
                       "uuid?"} {
  for (int rank = 0; rank < roster_.size(); ++rank) {
    participant_.names.push_back(member_name(roster_, rank));
  }
}

std::string Meeting::prefix() const { return "hbm/next/" + std::to_string(uuid_); }

// Members on other machines cannot see a death, so the member that finds it notifies them.
void Meeting::gather_all(const char* step) {
  std::string ids;
  for (const Handle& handle : roster_.handles) ids += handle.id + " ";
  try {
    run_in_formation(participant_, [&] {
      const std::vector<std::string> others =
          gather(participant_, step, everyone(participant_.size), [&] { return ids; });
      for (int rank = 0; rank < participant_.size; ++rank) {
        if (others[static_cast<size_t>(rank)] == ids) continue;
        throw Error(ErrorKind::kMismatch,
                    participant_.group + " cannot be formed: rank " + member_name(roster_, rank) +
                        " and rank " + member_name(roster_, participant_.rank) +
                        " have come with different handles, or in a different order, for uuid " +
                        std::to_string(uuid_) + "; give every member the same handles");
      }
    });
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kDeath) fail(error.what());
    throw;
  }
}

void Meeting::meet() { gather_all("handles"); }

void Meeting::conclude() { gather_all("formed"); }

void Meeting::fail(const std::string& why) noexcept {
  try {
    abort_formation(participant_, why);
  } catch (const std::exception& error) {
    log::info("cannot tell the other members of " + participant_.group + ": " + error.what());
  }
}

}  // namespace hbm::bootstrap
