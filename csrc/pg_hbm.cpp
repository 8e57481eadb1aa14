#include "pg_hbm.h"

#include <ATen/record_function.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "communicator/failure/node_death_watch.h"
#include "communicator/hierarchical/communicator.h"
#include "communicator/mpi/abandoned_requests.h"
#include "communicator/mpi/communicator.h"
#include "communicator/mpi/connect.h"
#include "communicator/shm/communicator.h"
#include "communicator/shm/join.h"
#include "kernels/reduce.h"
#include "memory/cpu_binding.h"
#include "memory/staging.h"
#include "memory/topology.h"
#include "process_group/segment_allocator.h"
#include "process_group/store.h"
#include "process_group/types.h"

namespace hbm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPartingPatience{1000};
constexpr milliseconds kNewsPatience{1500};      // for the cause of an error of MPI's
constexpr milliseconds kSightPatience{700};      // for the sight of a death, with no store to ask
constexpr milliseconds kNeighbourPatience{200};  // for a late neighbour's word of whom it waits for

constexpr size_t kMostNodeChunk = 128 << 10;  // larger ones leave the processor's cache

memory::BindMode bind_mode() {
  const char* wanted = std::getenv("HBMCOMM_BIND");
  return memory::parse_bind_mode(wanted != nullptr && *wanted != '\0' ? wanted : "none");
}

// By the largest group that this process has seen, and the cores that it may use: the ranks of
// other groups want theirs too.
bool more_ranks_than_cores(int local_size) {
  static std::atomic<int> most{0};
  int seen = most.load();
  while (seen < local_size && !most.compare_exchange_weak(seen, local_size)) {
  }
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const int cores = sched_getaffinity(0, sizeof(allowed), &allowed) == 0
                        ? CPU_COUNT(&allowed)
                        : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return std::max(seen, local_size) > cores;
}

// Once in a process: binds it if HBMCOMM_BIND says so, and tells where it runs.
void bind_once(int local_rank, int local_size) {
  static std::once_flag once;
  std::call_once(once, [&] {
    const memory::BindMode mode = bind_mode();
    if (mode != memory::BindMode::kNone) {
      log::info("bound to " + memory::bind(mode, local_rank, local_size));
    } else if (log::enabled(log::Level::kInfo)) {
      log::info("not bound (HBMCOMM_BIND=none); running on NUMA node " +
                std::to_string(memory::discover().cpu_node));
    }
  });
}

// A failed collective leaves the ranks at different places, so all must know. What came from
// another rank is known already.
bool breaks_collectives(ErrorKind kind) { return kind != ErrorKind::kPeer; }

// A send or receive that timed out is its own affair.
bool breaks_transfers(ErrorKind kind) {
  return kind == ErrorKind::kMismatch || kind == ErrorKind::kDeath;
}

}  // namespace

ProcessGroupHbm::ProcessGroupHbm(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                 c10::intrusive_ptr<GroupOptions> options, std::string name)
    : Backend(rank, size),
      options_(std::move(options)),
      name_("group \"" + std::move(name) + "\""),
      c10d_store_(store),
      channel_(std::make_shared<mpi::Channel>()),
      timeout_ms_(options_->timeout.count()) {
  const auto& global_ranks = options_->global_ranks_in_group;
  log::set_rank(global_ranks.empty() ? rank
                                     : static_cast<int>(global_ranks[static_cast<size_t>(rank)]));
  translated([&] {
    store_ = make_key_value(store);
    channel_->rank = rank;
    channel_->size = size;
    channel_->group = name_;
    channel_->chunk_bytes = mpi::chunk_bytes(options_->staging_bytes, size);
    connect(Clock::now() + options_->timeout);
  });
  init();
}

void ProcessGroupHbm::connect(Clock::time_point deadline) {
  mpi::sweep();
  std::optional<shm::NeighbourListener> listener;
  const bootstrap::Rendezvous rendezvous =
      bootstrap::rendezvous_of(store_, rank_, size_, name_, deadline, [&] {
        prepare();
        // The version stands for the layout of messages and the cutting into chunks.
        bootstrap::Member self = bootstrap::introduce(HBM_VERSION, channel_->chunk_bytes);
        const std::string& boxes = options_->parameter_server;
        self.parameter_server = boxes.empty() ? "none" : boxes == "auto" ? boxes : "addresses";
        if (size_ > 1 && self.node_layer == bootstrap::kSharedMemory) {
          self.segment = memory::policy_name(options_->policy);
          self.listener = listener.emplace().name();
        }
        return self;
      });
  members_ = rendezvous.members;
  prefix_ = rendezvous.participant.prefix;

  const std::vector<int> local = bootstrap::on_machine_of(rank_, members_);
  const int local_size = static_cast<int>(local.size());
  const auto local_rank = std::find(local.begin(), local.end(), rank_) - local.begin();
  bind_once(static_cast<int>(local_rank), local_size);
  neighbours_ = listener ? shm::explore(rendezvous, *listener, [this] { return segment_; })
                         : shm::apart(size_);
  crowded_ = more_ranks_than_cores(local_size);
  choose_transport(rendezvous);
  collectives_ =
      OperationQueue::create(OperationQueue::Order::kOrdered, crowded_, hooks(&breaks_collectives));
  OperationQueue::Hooks of_transfers = hooks(&breaks_transfers);
  of_transfers.failed = [this, publish = of_transfers.failed](const std::exception_ptr& error) {
    publish(error);
    try {
      std::rethrow_exception(error);
    } catch (const Error& ours) {
      // On one node the peer may have given up this transfer alone.
      const bool group_failed =
          ours.kind() == ErrorKind::kPeer && (!one_node_ || shm_group_->failed());
      if (breaks_transfers(ours.kind()) || group_failed) {
        collectives_->abort(ours.what());
      }
    } catch (const std::exception& other) {
      collectives_->abort(other.what());
    }
  };
  transfers_ =
      OperationQueue::create(OperationQueue::Order::kUnordered, crowded_, std::move(of_transfers));
}

// Shared memory within a node, MPI between nodes; MPI everywhere with HBMCOMM_NODE=mpi.
void ProcessGroupHbm::choose_transport(const bootstrap::Rendezvous& rendezvous) {
  const bool shared_memory = rendezvous.members.front().node_layer == bootstrap::kSharedMemory;
  if (shared_memory) {
    shm_group_ = shm::join(rendezvous, segment_, neighbours_,
                           std::min(kMostNodeChunk, channel_->chunk_bytes), crowded_);
    one_node_ = shm_group_->size() == static_cast<size_t>(size_);
    if (one_node_) {
      transport_ = shm::make_communicator(shm_group_);
      return;
    }
  }
  mpi::MpiConnection connection;
  if (size_ > 1) {
    connection = mpi::connect(rendezvous, shared_memory ? neighbours_.node_of : std::vector<int>());
    channel_->communicator = connection.communicator;
  }
  follow_news(rendezvous);
  transport_ = mpi::make_communicator(channel_);
  if (shared_memory) {
    transport_ = hierarchical::make_communicator(
        hierarchical::make_node_layout(rendezvous, connection, neighbours_.node_of, shm_group_,
                                       *channel_),
        transport_);
  }
}

// From here on this rank learns, and tells, what happens on other nodes.
void ProcessGroupHbm::follow_news(const bootstrap::Rendezvous& rendezvous) {
  if (size_ == 1) return;
  const auto death_watch =
      std::make_shared<failure::NodeDeathWatch>(rendezvous, neighbours_.node_of);
  std::vector<std::string> names;
  for (int rank = 0; rank < size_; ++rank) names.push_back("rank " + list_ranks({rank}));
  const auto dead = [death_watch, shm_group = shm_group_] {
    std::vector<int> ranks = death_watch->dead();
    if (!shm_group) return ranks;
    const std::vector<int> here = shm_group->dead();
    ranks.insert(ranks.end(), here.begin(), here.end());
    return ranks;
  };
  failure_monitor_ = std::make_unique<failure::FailureMonitor>(failure::FailureMonitor::Setup{
      name_, rank_, std::move(names), store_, rendezvous.participant.prefix + "news/", dead});
}

// Takes what this rank needs of its machine, before the others come to rely on it.
void ProcessGroupHbm::prepare() {
  reduce_isa();
  bind_mode();
  channel_->staging = memory::process_staging(options_->policy, options_->staging_bytes);
  segment_ = memory::process_segment(options_->policy);
}

ProcessGroupHbm::~ProcessGroupHbm() {
  stop();
  try {
    close_resource(/*patient=*/false);
  } catch (const std::exception& error) {
    log::error(name_ + " is gone, and not all that belonged to it was closed: " + error.what());
  }
}

// The queues are stopped before the group ends, so the hooks may refer to it.
OperationQueue::Hooks ProcessGroupHbm::hooks(bool (*concerns_all)(ErrorKind)) {
  return {[this](const Operation& operation) { watch(operation); },
          [this](const Operation& operation, const std::exception_ptr& error) {
            return explain(operation, error);
          },
          [this, concerns_all](const std::exception_ptr& error) { publish(error, concerns_all); },
          [this] {
            if (shm_group_) shm_group_->wake();
          },
          [this](const std::vector<int>& ranks) { return name_ranks(ranks); }};
}

// Looks whether another rank has died or published a failure, or one that is waited for has left.
void ProcessGroupHbm::watch(const Operation& operation) {
  if (shm_group_) shm_group_->require_alive(operation.missing(), operation, [] { return false; });
  if (failure_monitor_) failure_monitor_->check(operation);
}

// Whether a rank that is late may itself be waiting, for one on another node.
bool ProcessGroupHbm::waits_for_neighbour(const Operation& operation) const {
  if (one_node_ || !shm_group_) return false;
  const std::vector<int> missing = operation.missing();
  for (size_t i = 0; i < shm_group_->size(); ++i) {
    if (std::ranges::count(missing, shm_group_->member(i).rank) > 0) return true;
  }
  return false;
}

// MPI's errors are mostly the consequence of a death, which it does not name; and when a neighbour
// is late because it waits for a third rank, its timeout comes at about the same time as ours, and
// knows more.
std::exception_ptr ProcessGroupHbm::explain(const Operation& operation,
                                            const std::exception_ptr& error) {
  milliseconds patience = kNewsPatience;
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    if (ours.kind() == ErrorKind::kTimeout && waits_for_neighbour(operation)) {
      patience = kNeighbourPatience;
    } else if (ours.kind() != ErrorKind::kNetwork) {
      return error;
    }
  } catch (...) {
    return error;
  }
  std::exception_ptr found = error;
  Clock::time_point end = Clock::now() + patience;
  do {
    try {
      watch(operation);
    } catch (const Error& cause) {
      if (cause.kind() != ErrorKind::kNetwork) return std::current_exception();
      if (found == error) end = std::min(end, Clock::now() + kSightPatience);
      found = std::current_exception();  // the store is gone
    }
    std::vector<int> dead = shm_group_ ? shm_group_->dead() : std::vector<int>();
    if (dead.empty() && failure_monitor_) dead = failure_monitor_->dead();
    if (!dead.empty()) {
      return std::make_exception_ptr(Error(
          ErrorKind::kDeath, operation.describe() + ": rank " + list_ranks(dead) + " has died"));
    }
    std::this_thread::sleep_for(milliseconds(20));
  } while (Clock::now() < end);
  return found;
}

void ProcessGroupHbm::publish(const std::exception_ptr& error, bool (*concerns_all)(ErrorKind)) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    const bool of_collective = concerns_all == &breaks_collectives;
    if (of_collective && ours.kind() == ErrorKind::kPeer && shm_group_) {
      shm_group_->report(ours.what(), /*death=*/false);
    }
    if (!concerns_all(ours.kind())) return;
    announce(ours.what());
  } catch (const std::exception& other) {
    announce(other.what());
  }
}

void ProcessGroupHbm::announce(const std::string& failure) {
  const std::string report = "rank " + std::to_string(rank_) + ": " + failure;
  if (shm_group_) shm_group_->report(report, /*death=*/false);
  if (failure_monitor_) failure_monitor_->report(report);
}

std::string ProcessGroupHbm::name_ranks(const std::vector<int>& ranks) const {
  if (ranks.empty()) return "every rank had joined";
  return "missing ranks: " + list_ranks(ranks);
}

std::string ProcessGroupHbm::list_ranks(const std::vector<int>& ranks) const {
  std::string text;
  for (const int rank : ranks) {
    const bootstrap::Member& member = members_[static_cast<size_t>(rank)];
    if (!text.empty()) text += ", ";
    text +=
        std::to_string(rank) + " (pid " + std::to_string(member.pid) + " on " + member.host + ")";
  }
  return text;
}

milliseconds ProcessGroupHbm::timeout_or_default(milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? milliseconds(timeout_ms_.load()) : timeout;
}

int ProcessGroupHbm::check_root(int64_t root, const char* operation) const {
  if (root < 0 || root >= size_) {
    throw Error(ErrorKind::kInvalid, std::string(operation) + ": rank " + std::to_string(root) +
                                         " is not in " + name_ + ", which has ranks 0 to " +
                                         std::to_string(size_ - 1));
  }
  return static_cast<int>(root);
}

void ProcessGroupHbm::check_list(size_t found, const char* operation, const char* argument) const {
  if (found != static_cast<size_t>(size_)) {
    throw Error(ErrorKind::kInvalid, std::string(operation) + ": " + argument + " has " +
                                         std::to_string(found) + " tensors for " +
                                         std::to_string(size_) + " ranks");
  }
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::run(const Call& call, StagedTensors views,
                                                    const MakeOperation& make) {
  collectives_->require_owner(call.name);
  auto work = c10::make_intrusive<WorkHbm>(rank_, call.type, call.name, call.inputs, call.outputs,
                                           collectives_);
  std::unique_lock issue(issue_mutex_);
  auto operation = make(sequence_ + 1);
  const uint64_t sequence = ++sequence_;
  if (call.async || coalescing() || !collectives_->try_claim(call.name)) {
    return submit(collectives_, call, std::move(work), std::move(views), std::move(operation),
                  sequence, std::move(issue));
  }
  issue.unlock();
  DriverHooks hooks;
  try {
    record(call, sequence);
    hooks = views.take_hooks(work->end_of_range());
  } catch (...) {
    collectives_->unclaim();
    throw;
  }
  collectives_->run_claimed(*operation, timeout_or_default(call.timeout), std::move(hooks));
  work->bind(nullptr, sequence);
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::transfer(
    const Call& call, StagedTensors views,
    const std::function<std::unique_ptr<Operation>(std::shared_ptr<int>)>& make) {
  transfers_->require_owner(call.name);
  auto work = c10::make_intrusive<WorkHbm>(rank_, call.type, call.name, call.inputs, call.outputs,
                                           transfers_);
  auto operation = make(work->source_slot());
  return submit(transfers_, call, std::move(work), std::move(views), std::move(operation), 0, {});
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::submit(
    const std::shared_ptr<OperationQueue>& queue, const Call& call,
    c10::intrusive_ptr<WorkHbm> work, StagedTensors views, std::unique_ptr<Operation> operation,
    uint64_t sequence, std::unique_lock<std::mutex> issue) {
  auto ticket = queue->enqueue(std::move(operation), timeout_or_default(call.timeout),
                               views.take_hooks(work->end_of_range()));
  if (issue.owns_lock()) issue.unlock();
  work->bind(ticket, sequence);
  record(call, sequence);
  queue->launch(ticket, call.async ? Mode::kAsync : Mode::kSync);
  const std::lock_guard lock(coalescing_mutex_);
  if (coalescing_ == std::this_thread::get_id()) coalesced_.push_back(work);
  return work;
}

// Tells the profiler of an operation's arguments.
void ProcessGroupHbm::record(const Call& call, uint64_t sequence) const {
  if (!at::hasCallbacks()) return;
  RECORD_PARAM_COMMS_DATA(std::make_tuple(static_cast<int64_t>(sequence), c10d::isP2POp(call.type)),
                          std::make_tuple(pg_uid_, pg_desc_), call.inputs, call.outputs, rank_,
                          call.name + 4, call.inputs.empty() ? 0 : call.inputs.front().numel(),
                          call.outputs.empty() ? 0 : call.outputs.front().numel(),
                          call.outputs.empty() ? at::kByte : call.outputs.front().scalar_type(),
                          std::vector<int64_t>(), std::vector<int64_t>(), -1, -1, size_);
}

bool ProcessGroupHbm::coalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  return coalescing_ == std::this_thread::get_id();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::all_of(
    c10d::OpType type, std::vector<c10::intrusive_ptr<c10d::Work>> works) {
  return c10::make_intrusive<WorkAll>(rank_, type, std::move(works));
}

uint64_t ProcessGroupHbm::getSequenceNumberForGroup() {
  const std::lock_guard lock(issue_mutex_);
  return sequence_;
}

void ProcessGroupHbm::setTimeout(milliseconds timeout) {
  timeout_ms_.store(timeout.count());
  options_->timeout = timeout;
}

c10d::ErrorType ProcessGroupHbm::getError() {
  const std::exception_ptr error = collectives_->broken();
  if (!error) return c10d::ErrorType::SUCCESS;
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    if (ours.kind() == ErrorKind::kTimeout) return c10d::ErrorType::TIMEOUT;
    if (ours.kind() == ErrorKind::kPeer || ours.kind() == ErrorKind::kDeath) {
      return c10d::ErrorType::REMOTE_ERROR;
    }
  } catch (...) {
    return c10d::ErrorType::COMM_ERROR;
  }
  return c10d::ErrorType::COMM_ERROR;
}

void ProcessGroupHbm::abort() {
  if (collectives_->in_forked_child()) return;
  const std::string reason = name_ + " was aborted on rank " + std::to_string(rank_);
  publish(std::make_exception_ptr(Error(ErrorKind::kAborted, reason)), &breaks_collectives);
  collectives_->abort(reason);
  transfers_->abort(reason);
  close_resource(/*patient=*/false);
}

void ProcessGroupHbm::shutdown() {
  if (!collectives_ || collectives_->in_forked_child() || shut_down_.exchange(true)) return;
  part();
  if (!collectives_->broken()) {
    if (shm_group_) shm_group_->leave();
    if (failure_monitor_) failure_monitor_->leave(kPartingPatience);
  }
  stop();
  close_resource(/*patient=*/true);
}

void ProcessGroupHbm::stop() {
  if (collectives_) collectives_->stop();
  if (transfers_) transfers_->stop();
  if (failure_monitor_) failure_monitor_->stop();
}

// A last barrier, so that no rank ends while MPI still holds a message of it: what a rank has sent
// is on its way only as long as that rank calls MPI. A rank that does not come in kPartingPatience
// is not waited for.
void ProcessGroupHbm::part() {
  if (size_ == 1 || collectives_->broken()) return;
  try {
    if (!collectives_->try_claim("destroy_process_group")) return;
  } catch (const Error&) {
    return;  // it has broken meanwhile
  }
  try {
    const auto farewell = OperationQueue::create(OperationQueue::Order::kOrdered, crowded_, {});
    const uint64_t sequence = getSequenceNumberForGroup() + 1;
    const auto ticket = farewell->enqueue(
        transport_->barrier(sequence), std::min(kPartingPatience, milliseconds(timeout_ms_)), {});
    farewell->launch(ticket, Mode::kSync);
    farewell->stop();
    if (ticket->error()) std::rethrow_exception(ticket->error());
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kMismatch) {
      log::error(name_ + " was destroyed after its ranks had come apart: " + error.what());
    } else {
      log::info(name_ + " was destroyed before every rank came to do so: " + error.what());
    }
  }
  collectives_->unclaim();
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupHbm::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) return nullptr;
  auto given = c10::dynamic_intrusive_pointer_cast<GroupOptions>(opts);
  if (opts && !given) {
    throw std::invalid_argument("split: the options must be torch_hbmcomm.Options, not those of " +
                                opts->backend);
  }
  auto options = c10::make_intrusive<GroupOptions>(given ? *given : *options_);
  if (!given) options->timeout = milliseconds(timeout_ms_.load());
  options->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    const auto& global = options_->global_ranks_in_group;
    options->global_ranks_in_group.push_back(global.empty() ? static_cast<uint64_t>(rank)
                                                            : global[static_cast<size_t>(rank)]);
  }
  return c10::make_intrusive<ProcessGroupHbm>(
      store, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()), options,
      given && !given->group_name.empty() ? given->group_name : name_);
}

bool ProcessGroupHbm::supportsTensorAlloc(c10::DeviceIndex /*device*/) { return true; }

at::Tensor ProcessGroupHbm::allocateTensor(long size, at::TensorOptions options) {
  return translated(
      [&] { return tensor_in(segment_, {size}, c10::typeMetaToScalarType(options.dtype())); });
}

std::shared_ptr<c10::Allocator> ProcessGroupHbm::getMemAllocator() {
  return segment_allocator(segment_);
}

std::unordered_map<std::string, uint64_t> ProcessGroupHbm::getMemoryStats() {
  const memory::SharedSegmentStats segment = segment_->stats();
  const memory::StagingStats staging = channel_->staging->stats();
  return {{"segment.in_use_bytes", segment.in_use_bytes},
          {"segment.peak_bytes", segment.peak_bytes},
          {"segment.hbm_bytes", segment.hbm_bytes},
          {"segment.ddr_bytes", segment.ddr_bytes},
          {"segment.spills", segment.spills},
          {"segment.page_bytes", segment.page_bytes},
          {"slots.bytes", shm_group_ ? shm_group_->layout().total : 0},
          {"staging.budget_bytes", staging.budget_bytes},
          {"staging.reserved_bytes", staging.reserved_bytes},
          {"staging.kept_bytes", staging.kept_bytes},
          {"staging.overflow_bytes", staging.overflow_bytes},
          {"staging.abandoned_bytes", mpi::sweep()}};
}

}  // namespace hbm
