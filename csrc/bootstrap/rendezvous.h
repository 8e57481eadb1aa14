// The rendezvous of a new group's ranks in the store, before anything that could hang: each says
// who it is and waits for the others, so that an error can name the ranks that did not come.
//
// Threads: meet() is called once per group, by the thread that creates it; all other functions may
// be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/gather.h"
#include "bootstrap/key_value.h"

namespace hbm::bootstrap {

// 128 random bits in hexadecimal: 32 characters, which no other process on any machine has.
std::string random_id();

// A random_id() of this process, the same on every call; a forked child has one of its own.
const std::string& process_id();

// A second random_id() of this process. Its mailbox (communicator/failure/mailbox.h) has this name,
// which other users of the machine see; they do not see process_id().
const std::string& mailbox_id();

// A rank's record of itself, which the others read.
struct Member {
  std::string ranks;  // list_members() of the group, by their numbers in the job: equal on all

  std::string version;           // of torch_hbmcomm
  std::string staging_bytes;     // the option
  std::string transport;         // transport_name()
  std::string parameter_server;  // its kind; these four must be equal on all ranks

  std::string job;  // job_id(): equal on all ranks that have one

  std::string host;
  long pid = 0;
  std::string process;            // process_id()
  std::string boot_id;            // of its kernel
  std::string pid_namespace;      // within which its pid means it
  std::string started;            // start_of() it
  std::string network_namespace;  // within which abstract Unix sockets are seen
  std::string forced_node;        // HBMCOMM_NODE_ID, which forces ranks of one machine apart

  // For communicator/shm/neighbours.h; empty where it is not used.
  std::string segment;   // which of its segments it offers: unique within the process
  std::string listener;  // where it listens for them

  // For communicator/connect/crowd.h: where it may run, for how long, and how many want to.
  std::string processors;
  std::string quota;
  std::string most_ranks;

  std::string links;  // where rank 0 takes links: communicator/failure/node_links.h
};

// "3 (pid 4711 on host)", for errors.
std::string rank_name(int rank, const Member& member);

// When a process of this PID namespace started, by the clock of this process' time namespace, which
// the text names; empty if /proc does not tell.
std::string start_of(long pid);

// Returns true if two starts of one PID, as start_of() tells them, prove that it is another process
// `now`. Clocks of two time namespaces cannot be compared.
bool is_restarted(const std::string& started, const std::string& now);

// The machine's name.
std::string host_name();

// Names the PID namespace that this process is in.
std::string pid_namespace();

// This process' own record, without the fields that only the group's communicator knows.
Member introduce(const std::string& version, uint64_t staging_bytes);

struct Rendezvous {
  Participant participant;  // for further steps of the same ranks
  std::vector<Member> members;
};

// Exchanges the records that each rank's `self` returns; an exception from it reaches every rank,
// see gather(). Throws Error(kTimeout) naming the ranks that did not come, Error(kMismatch) when
// what must be equal differs, or another process has come as this rank. `store` is the group's own;
// a second rendezvous of the same ranks in the same store is told from the first. `watch` meets the
// ranks as they come: rank 0 first, so that the death of any that has introduced itself is seen.
// `members_in_job` are the ranks' numbers in the job; empty: the same numbers.
Rendezvous meet(std::shared_ptr<KeyValue> store, int rank, int size, const std::string& group,
                KeyValue::Deadline deadline, const std::function<Member()>& self,
                std::shared_ptr<RankWatch> watch = nullptr,
                std::vector<uint64_t> members_in_job = {});

// The ranks on the same machine as `rank`, itself included, ascending: of one kernel, and not
// forced apart. Whether they share memory is not said.
std::vector<int> on_machine_of(int rank, const std::vector<Member>& members);

}  // namespace hbm::bootstrap
