// A rank's claim names the process that forms the group as that rank. The claim is the head of the
// rank's record in the store, so a second process with the same rank finds it.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/descriptor.h"

namespace hbm::bootstrap {

struct Claim {
  std::string process;  // process_id()
  long pid = 0;
  std::string host;
  std::string boot_id;        // of the process' kernel
  std::string pid_namespace;  // in which `pid` is valid
  std::string started;        // start_of(pid)
  std::string job;            // job_id()
  std::string mailbox;        // mailbox_id()
};

// Returns the claim of this process.
Claim own_claim();

// Returns the claim as one line of text, which decode_claim() reads.
std::string encode(const Claim& claim);
Claim decode_claim(const std::string& line);

// Returns torchrun's id of this process' job (TORCHELASTIC_RUN_ID). Empty if torchrun did not start
// this process.
std::string job_id();

// Returns true if torchrun gave the two jobs different ids.
bool is_another_job(const std::string& one, const std::string& other);

// Returns true if this process replaces the claim's process after a restart by torchrun. The signs
// are equal torchrun job ids, and that the claim's process is not known to live. (The agent of
// torchrun keeps one store for all restarts of a job.)
bool is_predecessor(const Claim& claim);

// Returns true if the process has provably ended. Only the end of a process on this machine, in
// this PID namespace, can be proved.
bool has_ended(const Claim& claim);

// Sets `ended` to has_ended(). Returns a descriptor that becomes readable when the process ends.
// The result is empty if the process has ended or cannot be watched.
Descriptor open_process(const Claim& claim, bool* ended);

// Returns the process for an error's text: "pid 4711 on host".
std::string process_name(const Claim& claim);

// Returns the advice to give each job a store of its own, for an error's text.
std::string fresh_store_advice();

// Returns the members for an error's text: "[0, 1]". Long lists have ranges: "[0-63, 72]". Two
// lists give the same text only if they are equal.
std::string list_members(const std::vector<uint64_t>& members);

}  // namespace hbm::bootstrap
