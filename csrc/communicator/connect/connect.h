// Connects a new group: its ranks meet in the store, find out which of them share memory, and get
// the communicator that fits: shared memory if all are on one node, else MPI with shared memory
// within each node, or MPI alone if the group wants it (bootstrap/group_transport.h).
//
// Threads: called once per group, by the thread that creates it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/group_transport.h"
#include "bootstrap/key_value.h"
#include "bootstrap/rendezvous.h"
#include "communicator/communicator.h"
#include "communicator/peers.h"
#include "memory/policy.h"
#include "memory/segment.h"
#include "memory/staging.h"

namespace hbm {

// A rank's arguments to connect(). Version, transport, kind of parameter server and staging_bytes
// must be equal on all ranks.
struct GroupSetup {
  std::shared_ptr<KeyValue> store;      // the group's own keys
  std::shared_ptr<KeyValue> job_store;  // of all groups; one object for those of one c10d store
  std::vector<uint64_t> global_ranks;   // by rank; empty: unknown
  std::chrono::milliseconds heartbeat;  // the longest silence of another machine
  StoreServer server = StoreServer::kNoRank;  // of the stores
  int rank = 0;
  int size = 1;
  std::string group;  // as errors name it
  KeyValue::Deadline deadline;
  std::string version;  // of torch_hbmcomm: stands for the layout of messages
  GroupTransport transport = GroupTransport::kAuto;
  std::string parameter_server;  // its kind
  memory::Policy policy{};
  uint64_t staging_bytes = 0;
  size_t reduce_threads = 1;  // may differ between ranks; bounded by the cores that there are
};

struct GroupConnection {
  bootstrap::Rendezvous rendezvous;
  std::shared_ptr<memory::SharedSegment> segment;  // of tensors, and of what the node shares
  std::shared_ptr<memory::StagingPool> staging;    // of messages over MPI
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Peers> peers;
  bool crowded = false;  // more ranks than cores here
  StoreServer server = StoreServer::kNoRank;
};

// All ranks of the group call it. Also binds this process to its cores, once, if HBMCOMM_BIND says
// so.
//
// Throws Error(kDeath) naming a rank that dies meanwhile; Error(kNetwork) if the store is gone;
// Error(kInvalid) if staging_bytes or an environment variable makes no sense;
// Error(kTimeout) naming the ranks that do not come; Error(kMismatch) if ranks do not fit together;
// Error(kUnavailable) if the group wants shared memory and spans several nodes, or if a rank lacks
// what it needs, such as an MPI library. What fails on one rank reaches the others as in
// bootstrap::gather().
GroupConnection connect(const GroupSetup& setup);

}  // namespace hbm
