// The rendezvous of a new group's ranks in the store. Each rank publishes a record of itself and
// waits for the records of the others. The rendezvous ends before any call that could hang, so an
// error can name the missing ranks.
//
// Threads: meet() is called once per group, by the thread that creates the group. All other
// functions may be called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/gather.h"
#include "bootstrap/key_value.h"

namespace hbm::bootstrap {

// Returns 128 random bits in hexadecimal: 32 characters, unique among all processes of all
// machines. Throws Error(kUnavailable) if the kernel gives no random number.
std::string random_id();

// Returns the random_id() of this process, the same on every call. A forked child has its own.
const std::string& process_id();

// Returns a second random_id() of this process: the name of its mailbox
// (communicator/failure/mailbox.h). Other users of the machine can see this name, but not
// process_id().
const std::string& mailbox_id();

// A rank's record of itself, for the other ranks.
struct Member {
  std::string ranks;  // list_members() of the group, numbered as in the job: equal on all ranks

  // meet() throws unless each of these four fields is equal on all ranks.
  std::string version;           // of torch_hbmcomm
  std::string staging_bytes;     // the option
  std::string transport;         // transport_name()
  std::string parameter_server;  // "none", "auto" or "addresses"

  std::string job;  // job_id(): equal on all ranks with a job id

  std::string host;
  long pid = 0;
  std::string process;            // process_id()
  std::string boot_id;            // of the rank's kernel
  std::string pid_namespace;      // in which `pid` is valid
  std::string started;            // start_of(pid)
  std::string network_namespace;  // in which its abstract Unix sockets are visible
  std::string forced_node;        // HBMCOMM_NODE_ID: forces ranks of one machine onto several nodes

  // For communicator/shm/local_peers.h; empty if the rank does not look for local peers.
  std::string segment;   // the segment that the rank offers: a name unique within the process
  std::string listener;  // the socket on which the rank accepts local peers

  // For communicator/connect/oversubscription.h.
  std::string processors;     // allowed_processors(), a mask
  std::string quota;          // allowed_quota(); empty: none
  std::string most_ranks;     // most_ranks() of the rank's process
  std::string segment_bytes;  // the size of its segment

  // On rank 0 the address at which it accepts liveness connections
  // (communicator/failure/liveness_connections.h); empty on other ranks.
  std::string links;
};

// Returns the rank for an error's text: "3 (pid 4711 on host)".
std::string rank_name(int rank, const Member& member);

// Returns the start time of a process of this PID namespace, by the clock of this process' time
// namespace. The text also names that time namespace. Empty if /proc does not show the process.
std::string start_of(long pid);

// Returns start_of() this process, read once: the kernel takes longer for it the more threads the
// process has.
std::string own_start();

// Returns true if two start times of one PID, from start_of(), prove that the second belongs to
// another process. Clocks of two time namespaces are never compared.
bool is_restarted(const std::string& started, const std::string& now);

// Returns the machine's name.
std::string host_name();

// Returns the name of this process' PID namespace.
std::string pid_namespace();

// Returns the name of this process' network namespace.
std::string network_namespace();

// Returns this process' own record. Leaves the fields empty that communicator/connect/connect.cpp
// and meet() set.
Member introduce(const std::string& version, uint64_t staging_bytes);

struct Rendezvous {
  Participant participant;  // for further steps of the same ranks
  std::vector<Member> members;
};

// Exchanges the ranks' records. `self` makes this rank's record; an exception of `self` reaches
// every rank, as in gather().
//
// `store` is the group's own. Ranks may meet in it repeatedly: the n-th rendezvous of one rank is
// also the n-th of every other rank. Calls met() of `watch` for this rank, and for each other rank
// as it arrives. With a `watch`, each rank except rank 0 waits before it introduces itself. It
// first waits until rank 0 has introduced itself, at most kFirstRankTimeout. If rank 0 has done so,
// the rank then waits until rank 0 can detect the waiting rank's death, at most kWatchedTimeout.
// `members_in_job` are the ranks' numbers in the job; if empty, they equal the ranks.
//
// Throws Error(kTimeout) naming the missing ranks. Throws Error(kMismatch) if fields differ that
// must be equal, or another process has claimed this rank.
Rendezvous meet(std::shared_ptr<KeyValue> store, int rank, int size, const std::string& group,
                KeyValue::Deadline deadline, const std::function<Member()>& self,
                std::shared_ptr<RankWatch> watch = nullptr,
                std::vector<uint64_t> members_in_job = {});

// Returns the ranks on the machine of `rank`, ascending, with `rank` itself. These ranks run under
// the same boot of one kernel, and HBMCOMM_NODE_ID does not force them onto different nodes. They
// need not share memory.
std::vector<int> on_machine_of(int rank, const std::vector<Member>& members);

}  // namespace hbm::bootstrap
