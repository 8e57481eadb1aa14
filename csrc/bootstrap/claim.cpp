#include "bootstrap/claim.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <iomanip>
#include <sstream>
#include <utility>

#include "base/boot_id.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/tuning.h"

namespace hbm::bootstrap {
namespace {

// True if this process can see whether the claim's process lives.
bool is_visible(const Claim& claim) {
  return claim.boot_id == boot_id() && claim.pid_namespace == pid_namespace();
}

}  // namespace

Claim own_claim() {
  return {.process = process_id(),
          .pid = getpid(),
          .host = host_name(),
          .boot_id = boot_id(),
          .pid_namespace = pid_namespace(),
          .started = own_start(),
          .job = job_id(),
          .mailbox = mailbox_id()};
}

std::string encode(const Claim& claim) {
  std::ostringstream text;
  text << claim.pid;
  for (const std::string* field :
       {&claim.process, &claim.host, &claim.boot_id, &claim.pid_namespace, &claim.started,
        &claim.job, &claim.mailbox}) {
    text << ' ' << std::quoted(*field);
  }
  return text.str();
}

Claim decode_claim(const std::string& line) {
  std::istringstream text(line);
  Claim claim;
  text >> claim.pid;
  for (std::string* field : {&claim.process, &claim.host, &claim.boot_id, &claim.pid_namespace,
                             &claim.started, &claim.job, &claim.mailbox}) {
    text >> std::quoted(*field);
  }
  return claim;
}

std::string job_id() {
  const char* const id = std::getenv("TORCHELASTIC_RUN_ID");
  return id != nullptr ? id : "";
}

bool is_another_job(const std::string& one, const std::string& other) {
  return !one.empty() && !other.empty() && one != other;
}

bool is_predecessor(const Claim& claim) {
  return !claim.job.empty() && claim.job == job_id() && (!is_visible(claim) || has_ended(claim));
}

// A process that has ended stays visible until its parent has waited for it. A pidfd shows its end
// before.
Descriptor open_process(const Claim& claim, bool* ended) {
  *ended = false;
  if (!is_visible(claim)) return {};
  Descriptor pidfd(static_cast<int>(syscall(SYS_pidfd_open, claim.pid, 0)));
  pollfd end{pidfd.get(), POLLIN, 0};
  *ended =
      pidfd ? poll(&end, 1, 0) == 1 : kill(static_cast<pid_t>(claim.pid), 0) != 0 && errno == ESRCH;
  *ended = *ended || is_restarted(claim.started, start_of(claim.pid));
  return *ended ? Descriptor() : std::move(pidfd);
}

bool has_ended(const Claim& claim) {
  bool ended = false;
  open_process(claim, &ended);
  return ended;
}

std::string process_name(const Claim& claim) {
  return "pid " + std::to_string(claim.pid) + " on " + claim.host;
}

std::string fresh_store_advice() {
  return "give each job a store of its own: a new file for file://, another MASTER_PORT, or "
         "another PrefixStore";
}

std::string list_members(const std::vector<uint64_t>& members) {
  std::string text;
  for (size_t at = 0; at < members.size();) {
    size_t end = at + 1;
    while (members.size() > kMembersNamedSingly && end < members.size() &&
           members[end] == members[end - 1] + 1) {
      ++end;
    }
    text += (text.empty() ? "" : ", ") + std::to_string(members[at]);
    if (end - at > 1) text += "-" + std::to_string(members[end - 1]);
    at = end;
  }
  return "[" + text + "]";
}

}  // namespace hbm::bootstrap
