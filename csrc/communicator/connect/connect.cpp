#include "communicator/connect/connect.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "bootstrap/claim.h"
#include "communicator/connect/oversubscription.h"
#include "communicator/failure/failure_detector.h"
#include "communicator/hierarchical/communicator.h"
#include "communicator/mpi/communicator.h"
#include "communicator/mpi/connect.h"
#include "communicator/shm/communicator.h"
#include "communicator/shm/join.h"
#include "kernels/reduce.h"
#include "memory/cpu_binding.h"
#include "memory/topology.h"

namespace hbm::communicator::connect {
namespace {

memory::BindMode bind_mode() {
  const char* wanted = std::getenv("HBMCOMM_BIND");
  return memory::parse_bind_mode(wanted != nullptr && *wanted != '\0' ? wanted : "none");
}

// Logs at level info on which NUMA node this thread runs, and if binding would place its memory.
void log_unbound() {
  if (!log::enabled(log::Level::kInfo)) return;
  const memory::Topology found = memory::discover();
  log::info(
      "not bound (HBMCOMM_BIND=none); running on NUMA node " + std::to_string(found.cpu_node) +
      (found.cpu_nodes > 1 ? " of " + std::to_string(found.cpu_nodes) +
                                 ": HBMCOMM_BIND=auto keeps a rank near its memory (docs/memory.md)"
                           : ""));
}

// Returns the ranks among `local` that may use the same processors as `rank`.
std::vector<int> equally_allowed(int rank, const std::vector<int>& local,
                                 const std::vector<bootstrap::Member>& members) {
  const auto mask = [&](int of) { return members[static_cast<size_t>(of)].processors; };
  std::vector<int> equal;
  std::ranges::copy_if(local, std::back_inserter(equal),
                       [&](int peer) { return mask(peer) == mask(rank); });
  return equal;
}

// Binds the process if HBMCOMM_BIND says so, and logs where it runs; once in a process. kAuto
// divides processors among the ranks that may all use them. So it leaves a rank alone that a
// launcher has bound by itself.
void bind_once(int rank, const std::vector<int>& local,
               const std::vector<bootstrap::Member>& members) {
  static std::once_flag once;
  std::call_once(once, [&] {
    const memory::BindMode mode = bind_mode();
    if (mode == memory::BindMode::kNone) return log_unbound();
    const bool is_auto = mode == memory::BindMode::kAuto;
    const std::vector<int> among = is_auto ? equally_allowed(rank, local, members) : local;
    if (is_auto && among.size() == 1) {
      return log::info(
          "left on its own CPUs: no other rank here may use the same CPUs "
          "(HBMCOMM_BIND=auto)");
    }
    const auto place = std::ranges::find(among, rank) - among.begin();
    log::info("bound to " +
              memory::bind(mode, static_cast<int>(place), static_cast<int>(among.size())));
  });
}

// Takes memory for the group, on the NUMA nodes closest to the CPU that this thread runs on.
void take_memory(const GroupSetup& setup, GroupConnection& made) {
  made.staging = memory::process_staging(setup.policy, setup.staging_bytes);
  made.segment = memory::process_segment(setup.policy);
}

// Checks this rank's requirements before other ranks rely on it. Takes memory now, unless the
// process will be bound first.
void prepare(const GroupSetup& setup, GroupConnection& made) {
  kernels::reduce_isa();
  if (bind_mode() == memory::BindMode::kNone) take_memory(setup, made);
}

std::shared_ptr<mpi::Channel> make_channel(const GroupSetup& setup, const GroupConnection& made) {
  auto channel = std::make_shared<mpi::Channel>();
  channel->rank = setup.rank;
  channel->size = setup.size;
  channel->group = setup.group;
  channel->staging = made.staging;
  channel->chunk_bytes = mpi::chunk_bytes(setup.staging_bytes, setup.size);
  return channel;
}

// Returns the ranks of each node and the host of the node's first rank, as in "[0, 1] on a, [2] on
// b".
std::string list_nodes(const std::vector<int>& node_of,
                       const std::vector<bootstrap::Member>& members) {
  std::map<int, std::vector<uint64_t>> nodes;
  for (size_t rank = 0; rank < node_of.size(); ++rank) nodes[node_of[rank]].push_back(rank);
  std::string text;
  for (const auto& [node, ranks] : nodes) {
    text += (text.empty() ? "" : ", ") + bootstrap::list_members(ranks) + " on " +
            members[ranks.front()].host;
  }
  return text;
}

// Throws Error(kUnavailable), with the same text on all ranks, if the transport is kShm and the
// group spans several nodes.
void require_one_node(const GroupSetup& setup, const std::vector<int>& node_of,
                      const std::vector<bootstrap::Member>& members) {
  const bool all = std::ranges::all_of(node_of, [&](int node) { return node == node_of.front(); });
  if (setup.transport != bootstrap::GroupTransport::kShm || all) return;
  throw Error(ErrorKind::kUnavailable,
              "transport is \"shm\", and not all ranks of " + setup.group +
                  " share memory; ranks that do: " + list_nodes(node_of, members) +
                  ". Choose \"auto\", which uses MPI between nodes (the option transport, or "
                  "HBMCOMM_NODE); HBMCOMM_LOG=info says why ranks of one machine share no memory");
}

// Chooses and makes the communicator. Calls detector.formed() before make_node_layout(), in which
// leaders wait for one another: after formed() the detector reads the failure log, so a death ends
// their wait.
void join_ranks(const GroupSetup& setup, const shm::LocalPeers& local_peers, size_t slot_chunk,
                size_t threads, failure::FailureDetector& detector, GroupConnection& made) {
  const std::vector<int>& node_of = local_peers.node_of;
  const std::string& prefix = made.rendezvous.participant.prefix;
  made.node_of = node_of;
  require_one_node(setup, node_of, made.rendezvous.members);
  std::shared_ptr<shm::ShmGroup> shm_group;
  if (setup.transport != bootstrap::GroupTransport::kMpi) {
    shm_group = shm::join(made.rendezvous, made.segment, local_peers, slot_chunk,
                          made.oversubscribed, threads);
    if (shm_group->size() == static_cast<size_t>(setup.size)) {
      detector.formed(prefix, shm_group);
      made.communicator = shm::make_communicator(shm_group);
      return;
    }
  }
  const std::shared_ptr<mpi::Channel> channel = make_channel(setup, made);
  mpi::MpiConnection connection;
  if (setup.size > 1) {
    connection = mpi::connect(made.rendezvous, shm_group ? node_of : std::vector<int>());
    channel->communicator = connection.communicator;
    channel->group_number = connection.group_number;
    if (const auto arrivals = connection.arrivals) {
      channel->round_trip = [arrivals] { return arrivals->round_trip(); };
    }
  }
  detector.formed(prefix, shm_group);
  if (!shm_group) {
    made.communicator = std::make_shared<mpi::MpiCommunicator>(channel);
    return;
  }
  made.communicator = std::make_shared<hierarchical::HierarchicalCommunicator>(
      channel,
      hierarchical::make_node_layout(made.rendezvous, connection, node_of, shm_group, *channel));
}

// Takes memory, finds the ranks that share it, and makes the communicator. REQUIRES: all ranks have
// introduced themselves.
void join_all(const GroupSetup& setup, shm::PeerListener* listener,
              failure::FailureDetector& detector, GroupConnection& made) {
  detector.all_met();

  const std::vector<int> local = bootstrap::on_machine_of(setup.rank, made.rendezvous.members);
  const int local_size = static_cast<int>(local.size());
  bind_once(setup.rank, local, made.rendezvous.members);
  if (!made.segment) take_memory(setup, made);
  const ProcessorDemand demand = processor_demand(local, made.rendezvous.members);
  count_group(local_size);
  made.oversubscribed = demand.oversubscribed();
  const size_t slot_chunk =
      shm_slot_chunk(setup.staging_bytes, least_segment_bytes(local, made.rendezvous.members),
                     made.oversubscribed);
  const shm::LocalPeers local_peers =
      listener != nullptr ? shm::explore(made.rendezvous, *listener, made.segment, slot_chunk)
                          : shm::apart(setup.size);
  // HBMCOMM_BIND may have reduced the processors since this rank introduced itself.
  const size_t cores = std::min(usable_processors({setup.rank}, made.rendezvous.members),
                                count_processors({allowed_processors()}));
  const size_t cores_of_rank = std::max<size_t>(1, cores / static_cast<size_t>(demand.ranks));
  const size_t threads = std::min(setup.reduce_threads, cores_of_rank);
  log::debug(setup.group + ": threads of a large reduction: " + std::to_string(threads));
  join_ranks(setup, local_peers, slot_chunk, threads, detector, made);
  detector.await_connections(setup.deadline);
}

GroupConnection connect_watched(const GroupSetup& setup,
                                const std::shared_ptr<failure::FailureDetector>& detector) {
  mpi::sweep_orphaned();
  GroupConnection made;
  made.server = setup.server;
  made.peers = detector;
  std::optional<shm::PeerListener> listener;
  const auto introduce = [&] {
    // chunk_bytes() throws if `staging_bytes` is too small for MPI. So a group that may need MPI
    // fails before its ranks meet.
    if (setup.transport != bootstrap::GroupTransport::kShm) {
      mpi::chunk_bytes(setup.staging_bytes, setup.size);
    }
    prepare(setup, made);
    // Ranks with equal versions have the same layout of messages. With equal staging_bytes they
    // also cut transfers over MPI into the same chunks.
    bootstrap::Member self = bootstrap::introduce(setup.version, setup.staging_bytes);
    if (setup.by_handles) self.job.clear();
    self.transport = bootstrap::transport_name(setup.transport);
    self.parameter_server = setup.parameter_server;
    self.processors = allowed_processors();
    self.quota = allowed_quota();
    self.most_ranks = std::to_string(most_ranks());
    self.segment_bytes = std::to_string(memory::process_segment_bytes(setup.policy));
    if (setup.size > 1 && setup.transport != bootstrap::GroupTransport::kMpi) {
      self.segment = memory::policy_name(setup.policy);
      self.listener = listener.emplace().name();
    }
    if (setup.size > 1) self.links = detector->prepare();
    return self;
  };
  made.rendezvous = bootstrap::meet(setup.store, setup.rank, setup.size, setup.group,
                                    setup.deadline, introduce, detector, setup.global_ranks);
  bootstrap::run_in_formation(made.rendezvous.participant, [&] {
    join_all(setup, listener ? &*listener : nullptr, *detector, made);
  });
  return made;
}

}  // namespace

void prepare_memory(memory::Policy policy, uint64_t staging_bytes) noexcept {
  try {
    if (bind_mode() != memory::BindMode::kNone) return;
    memory::process_segment(policy);
    memory::process_staging(policy, staging_bytes)->acquire(1);
  } catch (const std::exception& error) {
    log::debug(std::string("memory for later groups cannot be taken now: ") + error.what());
  }
}

GroupConnection connect(const GroupSetup& setup) {
  const auto detector = std::make_shared<failure::FailureDetector>(
      failure::GroupFacts{.name = setup.group,
                          .rank = setup.rank,
                          .global_ranks = setup.global_ranks,
                          .store = setup.store,
                          .job_store = setup.job_store,
                          .heartbeat = setup.heartbeat,
                          .server = setup.server});
  try {
    return connect_watched(setup, detector);
  } catch (const bootstrap::StoreError& error) {
    const bool is_gone = error.kind() == ErrorKind::kNetwork && !error.was_removed;
    throw Error(error.kind(), setup.group + " cannot be made: " + error.what() +
                                  (is_gone ? detector->deaths() : ""));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kNetwork) throw;
    throw Error(error.kind(), error.what() + detector->deaths());
  }
}

}  // namespace hbm::communicator::connect
