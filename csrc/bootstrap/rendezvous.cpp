#include "bootstrap/rendezvous.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iomanip>
#include <numeric>
#include <sstream>
#include <utility>

#include "base/boot_id.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "bootstrap/claim.h"
#include "bootstrap/early_failure.h"
#include "bootstrap/tuning.h"

namespace hbm::bootstrap {
namespace {

using std::chrono::steady_clock;

// Returns the time until which the other ranks wait for rank 0 before they introduce themselves.
KeyValue::Deadline first_rank_deadline(KeyValue::Deadline deadline) {
  const auto now = steady_clock::now();
  return now + std::min<steady_clock::duration>(kFirstRankTimeout,
                                                (deadline - now) / kFirstRankTimeoutDivisor);
}

struct ProcessId {
  const std::string text = random_id();
};

struct MailboxId {
  const std::string text = random_id();
};

struct OwnStart {
  const std::string text = start_of(getpid());
};

// Returns pointers to the fields of a record that follow the pid, in their order.
template <typename AnyMember>
auto fields_of(AnyMember& member) {
  return std::array{&member.ranks,
                    &member.version,
                    &member.staging_bytes,
                    &member.transport,
                    &member.parameter_server,
                    &member.job,
                    &member.host,
                    &member.process,
                    &member.boot_id,
                    &member.pid_namespace,
                    &member.started,
                    &member.network_namespace,
                    &member.forced_node,
                    &member.segment,
                    &member.listener,
                    &member.processors,
                    &member.quota,
                    &member.most_ranks,
                    &member.segment_bytes,
                    &member.links};
}

std::string encode(const Member& member) {
  std::ostringstream text;
  text << member.pid;
  for (const std::string* field : fields_of(member)) text << ' ' << std::quoted(*field);
  return text.str();
}

Member decode(const std::string& record) {
  std::istringstream text(record);
  Member member;
  text >> member.pid;
  for (std::string* field : fields_of(member)) text >> std::quoted(*field);
  return member;
}

void require_equal(const std::vector<Member>& members, std::string Member::* field,
                   const std::string& what, const std::string& group) {
  for (size_t r = 1; r < members.size(); ++r) {
    if (members[r].*field == members[0].*field) continue;
    throw Error(ErrorKind::kMismatch, what + " differs in " + group + ": rank 0 has " +
                                          members[0].*field + ", rank " + std::to_string(r) +
                                          " has " + members[r].*field +
                                          "; it must be the same on every rank");
  }
}

std::string prefix_of(long rendezvous) {
  return "hbm/rendezvous" + std::to_string(rendezvous) + "/";
}

// Sets the prefixes of the keys of the participant's records. The keys of the first step have a
// common prefix, so ranks that name different members read each other's records and throw. Groups
// with different members may have the same name, so the other keys contain the first member.
void set_prefixes(Participant& participant, long rendezvous) {
  participant.first_prefix = prefix_of(rendezvous);
  participant.prefix = participant.first_prefix + std::to_string(participant.members.front()) + "/";
}

// Finds the first rendezvous in which this rank has no record, and sets the prefixes. Rendezvous
// are numbered because a store may outlive a group: torchrun's agent keeps one for the whole job.
// The n-th rendezvous of one rank is also the n-th of every other rank. Throws if another process
// has left a record as this rank, unless torchrun has restarted that process as this one.
void find_rendezvous(Participant& participant) {
  const auto own_key = [&](long rendezvous) {
    set_prefixes(participant, rendezvous);
    return step_key(participant, kFirstStep, participant.rank);
  };
  const auto is_past = [&](long rendezvous) {
    return participant.store->has({own_key(rendezvous)}, participant.deadline);
  };
  long past = 0;
  long next = 1;
  for (; is_past(next); next *= 2) past = next;
  while (next - past > 1) {
    const long middle = past + (next - past) / 2;
    (is_past(middle) ? past : next) = middle;
  }
  if (past > 0) {
    const auto record = participant.store->get(own_key(past), participant.deadline);
    if (record) require_own_claim(participant, *record);
  }
  set_prefixes(participant, next);
}

// Throws Error(kMismatch) if the two ranks name different members. `own` and `other` are ranks of
// the group.
void require_same_ranks(const Participant& participant, int own, const Member& self, int other,
                        const Member& member) {
  if (member.ranks == self.ranks || member.version != self.version) return;
  const auto named = [&](int rank, const Member& its) {
    return "rank " +
           rank_name(static_cast<int>(participant.members[static_cast<size_t>(rank)]), its) +
           " names the ranks " + its.ranks;
  };
  throw Error(ErrorKind::kMismatch,
              "the members of " + participant.group + " differ: " + named(own, self) + ", and " +
                  named(other, member) +
                  "; every member must name the same ranks in the same order. If each does, the "
                  "store holds the keys of another job: " +
                  fresh_store_advice());
}

// Throws Error(kMismatch), the same on all ranks, if torchrun gave two ranks different job ids.
void require_same_job(const Participant& participant, const std::vector<Member>& members) {
  const auto has_id = [](const Member& member) { return !member.job.empty(); };
  const auto first = std::ranges::find_if(members, has_id);
  if (first == members.end()) return;
  const auto other = std::ranges::find_if(
      members, [&](const Member& each) { return is_another_job(first->job, each.job); });
  if (other == members.end()) return;
  const auto named = [&](auto member) {
    return "rank " + rank_name(static_cast<int>(member - members.begin()), *member) +
           " is of the job \"" + member->job + "\"";
  };
  throw Error(ErrorKind::kMismatch,
              "the ranks of " + participant.group + " are of two jobs: " + named(first) + ", and " +
                  named(other) + " (TORCHELASTIC_RUN_ID); " + fresh_store_advice() +
                  ". If they are one job, set TORCHELASTIC_RUN_ID to one value on every rank, or "
                  "unset it");
}

// Returns the records of all ranks, indexed by rank. Passes each record to `participant.watch` as
// soon as it is available.
std::vector<Member> exchange_records(const Participant& participant,
                                     const std::function<Member()>& self) {
  Member own;
  const auto introduced = [&](int other, const Member& member) {
    require_same_ranks(participant, participant.rank, own, other, member);
    if (participant.watch) participant.watch->met(other, member);
  };
  std::exception_ptr problem;
  try {
    own = self();
    own.ranks = list_members(participant.members);
    introduced(participant.rank, own);
  } catch (const std::exception&) {
    problem = std::current_exception();
  }
  if (!problem && participant.watch && participant.rank != 0) {
    if (const auto record = await_published(participant, kFirstStep, 0,
                                            first_rank_deadline(participant.deadline))) {
      introduced(0, decode(*record));
      participant.watch->await_sight(
          std::min(participant.deadline, steady_clock::now() + kWatchedTimeout));
    }
  }
  const auto own_text = [&] {
    if (problem) std::rethrow_exception(problem);
    return encode(own);
  };
  const auto arrived = [&](int other, const std::string& record) {
    introduced(other, decode(record));
  };
  std::vector<Member> members;
  for (const std::string& record :
       gather(participant, kFirstStep, everyone(participant.size), own_text, arrived)) {
    members.push_back(decode(record));
    require_same_ranks(participant, participant.rank, own, static_cast<int>(members.size()) - 1,
                       members.back());
  }
  require_same_job(participant, members);
  return members;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::string inode_of(const char* path) {
  struct stat found{};
  stat(path, &found);  // st_ino stays 0 if it fails
  return std::to_string(found.st_ino);
}

}  // namespace

std::string random_id() {
  std::array<unsigned, 4> random{};
  // Not std::random_device, which executes CPUID: slow in a virtual machine.
  if (getentropy(random.data(), sizeof(random)) != 0) {
    throw Error(
        ErrorKind::kUnavailable,
        std::string("the kernel gives no random number: getentropy: ") + std::strerror(errno));
  }
  std::array<char, 33> text{};
  std::snprintf(text.data(), text.size(), "%08x%08x%08x%08x", random[0], random[1], random[2],
                random[3]);
  return text.data();
}

const std::string& process_id() { return per_process<ProcessId>().text; }

const std::string& mailbox_id() { return per_process<MailboxId>().text; }

std::string host_name() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return host.data();
}

std::string pid_namespace() { return inode_of("/proc/self/ns/pid"); }

std::string network_namespace() { return inode_of("/proc/self/ns/net"); }

std::string start_of(long pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  // The program's name, in parentheses, may contain spaces and parentheses. The start time is the
  // 20th word after it.
  std::istringstream words(text.substr(std::min(text.rfind(')') + 1, text.size())));
  std::string word;
  for (int number = 0; number < 20 && words >> word; ++number) {
  }
  return words ? inode_of("/proc/self/ns/time") + "/" + word : std::string();
}

std::string own_start() {
  const std::string& read = per_process<OwnStart>().text;
  return read.empty() ? start_of(getpid()) : read;
}

bool is_restarted(const std::string& started, const std::string& now) {
  const auto time_namespace = [](const std::string& start) {
    return start.substr(0, start.find('/'));
  };
  return !started.empty() && !now.empty() && started != now &&
         time_namespace(started) == time_namespace(now);
}

Member introduce(const std::string& version, uint64_t staging_bytes) {
  Member self;
  self.version = version;
  self.staging_bytes = std::to_string(staging_bytes);
  self.job = job_id();
  self.host = host_name();
  self.pid = getpid();
  self.process = process_id();
  self.boot_id = boot_id();
  self.pid_namespace = pid_namespace();
  self.started = own_start();
  self.network_namespace = network_namespace();
  self.forced_node = environment("HBMCOMM_NODE_ID");
  return self;
}

Rendezvous meet(std::shared_ptr<KeyValue> store, int rank, int size, const std::string& group,
                KeyValue::Deadline deadline, const std::function<Member()>& self,
                std::shared_ptr<RankWatch> watch, std::vector<uint64_t> members_in_job) {
  Participant participant{std::move(store), {}, rank, size, group, deadline, std::move(watch)};
  participant.members = std::move(members_in_job);
  if (participant.members.empty()) {
    participant.members.resize(static_cast<size_t>(size));
    std::iota(participant.members.begin(), participant.members.end(), 0);
  }
  participant.steps = std::make_shared<std::set<std::string>>();
  find_rendezvous(participant);
  std::vector<Member> members;
  run_in_formation(participant, [&] { members = exchange_records(participant, self); });
  // These errors abort nothing, because each rank detects the same differences itself.
  require_equal(members, &Member::version, "the version of torch_hbmcomm", group);
  require_equal(members, &Member::staging_bytes,
                "staging_bytes (the option, or HBMCOMM_STAGING_BYTES)", group);
  require_equal(members, &Member::transport, "transport (the option, or HBMCOMM_NODE)", group);
  require_equal(members, &Member::parameter_server,
                "parameter_server (the option, or HBMCOMM_PARAMETER_SERVER)", group);
  return {participant, members};
}

void fail_early(std::shared_ptr<KeyValue> store, int rank, const std::vector<uint64_t>& members,
                const std::string& group, const std::string& why) {
  const int size = static_cast<int>(members.size());
  const bool is_member = rank >= 0 && rank < size;
  Participant participant{std::move(store),
                          {},
                          is_member ? rank : 0,
                          size,
                          group,
                          steady_clock::now() + kEarlyFailureTimeout};
  participant.members = members;
  try {
    if (is_member) {
      find_rendezvous(participant);
      run_in_formation(participant, [&] { throw Error(ErrorKind::kUnavailable, why); });
    }
    // A process outside of the group cannot count the group's formations in the store. So it aborts
    // the first.
    set_prefixes(participant, 1);
    abort_formation(participant,
                    "rank " + std::to_string(rank) + " of " + group + " cannot take part: " + why);
  } catch (const Error& error) {
    log::debug(group + " cannot be formed by rank " + std::to_string(rank) + ": " + error.what());
  }
}

std::string rank_name(int rank, const Member& member) {
  return std::to_string(rank) + " (pid " + std::to_string(member.pid) + " on " + member.host + ")";
}

std::vector<int> on_machine_of(int rank, const std::vector<Member>& members) {
  const Member& one = members[static_cast<size_t>(rank)];
  std::vector<int> ranks;
  for (size_t r = 0; r < members.size(); ++r) {
    if (members[r].boot_id == one.boot_id && members[r].forced_node == one.forced_node) {
      ranks.push_back(static_cast<int>(r));
    }
  }
  return ranks;
}

}  // namespace hbm::bootstrap
