// A rank's claim: the process that takes part in an attempt as that rank. It is the head of the
// record that the rank leaves in the store, so a second process that comes as the same rank finds
// it there.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hbm::bootstrap {

struct Claim {
  std::string process;  // process_id()
  long pid = 0;
  std::string host;
  std::string boot_id;        // of its kernel
  std::string pid_namespace;  // within which its pid means it
  std::string started;        // start_of() it
  std::string job;            // job_id()
  std::string mailbox;        // mailbox_id()
};

// Returns the claim of this process.
Claim own_claim();

// One line of text.
std::string encode(const Claim& claim);
Claim decode_claim(const std::string& line);

// Returns torchrun's id of this process' job (TORCHELASTIC_RUN_ID). Empty: torchrun did not start
// it.
std::string job_id();

// Returns true if torchrun gave the two jobs different ids.
bool is_another_job(const std::string& one, const std::string& other);

// Returns true if torchrun has started this process in the place of the claim's: its agent keeps
// one store for all restarts of a job. Both are of one torchrun job, and the former is not known to
// live.
bool is_predecessor(const Claim& claim);

// Returns true if the process has provably ended: it was on this machine.
bool has_ended(const Claim& claim);

// "pid 4711 on host", for errors.
std::string process_name(const Claim& claim);

// How to get a store that no other job has used, for errors.
std::string fresh_store_advice();

// "[0, 1]", for errors; runs of long lists are shortened: "[0-63, 72]". Equal for equal lists only.
std::string list_members(const std::vector<uint64_t>& members);

}  // namespace hbm::bootstrap
