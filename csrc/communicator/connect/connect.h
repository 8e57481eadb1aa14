// Connects a new group. Its ranks meet in the store and find out which of them share memory. The
// group then gets a communicator: shared memory if all ranks are on one node, else MPI with shared
// memory within each node. A group may ask for another transport (bootstrap/group_transport.h).
//
// Threads: called once for each group, by the thread that creates it.
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

namespace hbm::communicator::connect {

// A rank's arguments to connect(). Version, transport, kind of parameter server and staging_bytes
// must be equal on all ranks.
struct GroupSetup {
  std::shared_ptr<bootstrap::KeyValue> store;  // the group's own keys
  // The keys of all groups. All groups of a c10d store share one such object.
  std::shared_ptr<bootstrap::KeyValue> job_store;
  std::vector<uint64_t> global_ranks;   // by rank; empty: unknown
  std::chrono::milliseconds heartbeat;  // another machine may be silent for this time
  bootstrap::StoreServer server = bootstrap::StoreServer::kNoRank;  // of `store` and `job_store`
  // The ranks have met by handles. So they belong together, and torchrun's ids of their jobs may
  // differ: each may have an agent of its own.
  bool by_handles = false;
  int rank = 0;
  int size = 1;
  std::string group;  // as errors name it
  bootstrap::KeyValue::Deadline deadline;
  std::string version;  // of torch_hbmcomm; with equal versions the layout of messages is equal
  bootstrap::GroupTransport transport = bootstrap::GroupTransport::kAuto;
  std::string parameter_server;  // the kind of the parameter server
  memory::Policy policy{};
  uint64_t staging_bytes = 0;
  size_t reduce_threads = 1;  // may differ between ranks; the rank's cores limit it
};

struct GroupConnection {
  bootstrap::Rendezvous rendezvous;
  std::shared_ptr<memory::SharedSegment> segment;  // of tensors and control regions
  std::shared_ptr<memory::StagingPool> staging;    // of messages over MPI
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Peers> peers;
  // The node of each rank, numbered in the order of the nodes' first ranks. Ranks of a node share
  // memory. With the transport kMpi each rank is a node of its own.
  std::vector<int> node_of;
  bool oversubscribed = false;  // more ranks than usable processors here
  bootstrap::StoreServer server = bootstrap::StoreServer::kNoRank;
};

// Connects the group; all its ranks call it. Also binds this process to its cores, once, if
// HBMCOMM_BIND asks for it.
//
// Throws Error(kDeath) naming a rank that dies before the group is formed. Throws Error(kNetwork)
// if the store is gone, and Error(kTimeout) naming the ranks that do not come. Throws
// Error(kMismatch) if the arguments of ranks differ, or if another process has come as one of the
// ranks. Throws Error(kInvalid) for a staging_bytes that is too small, or an invalid environment
// variable. Throws Error(kExhausted) if memory is short. Throws Error(kUnavailable) if the
// transport is kShm and the group spans several nodes, or if a rank lacks a requirement, such as an
// MPI library. An error of one rank reaches the others as in bootstrap::gather().
GroupConnection connect(const GroupSetup& setup);

// Takes the memory of this process' groups, and loads memkind. So a later connect() and the first
// operation take less time. Does nothing if HBMCOMM_BIND will bind the process, because the memory
// must be near to its cores. Does nothing if memory or memkind is missing: connect() and operations
// that need it report that.
void prepare_memory(memory::Policy policy, uint64_t staging_bytes) noexcept;

}  // namespace hbm::communicator::connect
