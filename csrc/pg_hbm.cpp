#include "pg_hbm.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/process_end.h"
#include "bootstrap/gather.h"
#include "process_group/segment_allocator.h"
#include "process_group/store_connection.h"
#include "process_group/types.h"

namespace hbm::process_group {
namespace {

using std::chrono::milliseconds;

int64_t elements(const std::vector<at::Tensor>& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors) sum += tensor.numel();
  return sum;
}

}  // namespace

ProcessGroupHbm::ProcessGroupHbm(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                 c10::intrusive_ptr<GroupOptions> options, std::string name)
    : BackendBase(rank, size),
      options_(std::move(options)),
      name_("group \"" + std::move(name) + "\""),
      turnstile_(options_->enable_reconfigure),
      store_(store),
      flight_record_(std::in_place, *this, options_->numbers_in_job(size)),
      timeout_ms_(options_->timeout.count()) {
  log::set_rank(options_->numbers_in_job(size)[static_cast<size_t>(rank)]);
  translated([&] {
    if (options_->enable_reconfigure) {
      require_no_boxes();
      reconfiguration_ = std::make_unique<Reconfiguration>();
      reconfiguration_->handle();  // opens the store of the handle
      communicator::connect::prepare_memory(options_->policy, options_->staging_bytes);
    } else {
      take(connect(store, rank, size, options_->global_ranks_in_group,
                   progress::Clock::now() + options_->timeout));
    }
  });
  init();
}

void ProcessGroupHbm::take(communicator::connect::GroupConnection made) {
  connection_ = std::move(made);
  profiled_group_ = describe_group_for_profile();
  Profile::formed(*profiled_group_);
  queue_ = progress::OperationQueue::create(
      progress::OperationQueue::Order::kOrdered, connection_.oversubscribed,
      hooks([this](const std::exception_ptr& error) { collective_failed(error); }));
  p2p_queue_ = progress::OperationQueue::create(
      progress::OperationQueue::Order::kUnordered, connection_.oversubscribed,
      hooks([this](const std::exception_ptr& error) { p2p_failed(error); }));
}

// A box of rank 0's would end with that rank.
void ProcessGroupHbm::require_no_boxes() const {
  if (options_->parameter_server.empty()) return;
  throw Error(ErrorKind::kInvalid,
              name_ +
                  " cannot have both enable_reconfigure=True and a parameter server (the option "
                  "parameter_server, or HBMCOMM_PARAMETER_SERVER): make the parameter server "
                  "in a group of its own");
}

communicator::connect::GroupConnection ProcessGroupHbm::connect(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const std::vector<uint64_t>& members, progress::Clock::time_point deadline) const {
  const std::string& boxes = options_->parameter_server;
  const std::string kind = boxes.empty() ? "none" : boxes == "auto" ? boxes : "addresses";
  const GroupStore keys = connect_store(store);
  try {
    return communicator::connect::connect({.store = keys.group,
                                           .job_store = keys.job,
                                           .global_ranks = members,
                                           .heartbeat = options_->heartbeat(),
                                           .server = keys.server,
                                           .by_handles = keys.by_handle,
                                           .rank = rank,
                                           .size = size,
                                           .group = name_,
                                           .deadline = deadline,
                                           .version = HBM_VERSION,
                                           .transport = options_->transport,
                                           .parameter_server = kind,
                                           .policy = options_->policy,
                                           .staging_bytes = options_->staging_bytes,
                                           .reduce_threads = options_->reduce_threads});
  } catch (const std::system_error& error) {
    // No thread could be started. connect() has notified the other ranks.
    throw Error(ErrorKind::kUnavailable, name_ + ": " + error.what());
  }
}

ProcessGroupHbm::~ProcessGroupHbm() {
  const ShortSection section;  // the communicator's destructor calls MPI
  process_ends() ? leave_all() : stop();
  try {
    close_resource(/*patient=*/false);
  } catch (const std::exception& error) {
    log::error(name_ + " is gone, and not all that belonged to it was closed: " + error.what());
  }
  connection_ = {};
}

// The hooks may refer to the group, because the queues are stopped before it is destroyed.
progress::OperationQueue::Hooks ProcessGroupHbm::hooks(
    std::function<void(const std::exception_ptr& error)> failed) {
  return {[this](const progress::Operation& operation) { connection_.peers->check(operation); },
          [this](const progress::Operation& operation, const std::exception_ptr& error) {
            return connection_.peers->explain(operation, error);
          },
          std::move(failed),
          [this] { connection_.communicator->wake(); },
          [this](const std::vector<int>& ranks) { return missing_ranks(ranks); },
          [this] { return connection_.peers->changes(); }};
}

// Breaks the group if ranks of two jobs may have formed it.
void ProcessGroupHbm::check_claims() {
  const std::string why = connection_.peers->claimed_twice();
  if (why.empty() || queue_->broken()) return;
  connection_.peers->report_failure(Error(ErrorKind::kAborted, why));
  abort_hooks_.run(name_);
  queue_->abort(why);
  p2p_queue_->abort(why);
}

// A failed collective leaves the ranks at different steps, so all ranks must be notified.
void ProcessGroupHbm::collective_failed(const std::exception_ptr& error) {
  abort_hooks_.run(name_);
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    connection_.peers->report_failure(ours);
    trace(ours);
  } catch (const std::exception& failure) {
    connection_.peers->report_failure(failure);
  }
}

// A user compares the flight records of all ranks, so a rank that is notified of another rank's
// timeout writes its record too.
void ProcessGroupHbm::trace(const Error& error) const {
  if (error.kind() != ErrorKind::kTimeout && error.kind() != ErrorKind::kPeer) return;
  const std::string line =
      std::string(error.what()) + "; what this process was doing is " + flight_record_->write();
  if (error.kind() == ErrorKind::kTimeout) {
    log::error(line);
  } else {
    log::info(line);
  }
}

// A send or receive that timed out fails alone. An error that shows a broken group breaks the
// collectives too.
void ProcessGroupHbm::p2p_failed(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    trace(ours);
    const bool known = ours.kind() == ErrorKind::kPeer && connection_.peers->group_failed();
    if (ours.kind() != ErrorKind::kMismatch && ours.kind() != ErrorKind::kDeath && !known) return;
    connection_.peers->report_failure(ours);
    abort_hooks_.run(name_);
    queue_->abort(ours.what());
  } catch (const std::exception& other) {
    connection_.peers->report_failure(other);
    abort_hooks_.run(name_);
    queue_->abort(other.what());
  }
}

std::string ProcessGroupHbm::missing_ranks(const std::vector<int>& ranks) const {
  if (ranks.empty()) return "every rank had joined";
  return "missing ranks: " + connection_.peers->list(ranks);
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

StagedTensors ProcessGroupHbm::stage(const at::Tensor& tensor, const char* operation) {
  if (tensor.is_cpu()) return StagedTensors();
  const std::lock_guard lock(device_mutex_);
  const c10::Device own = device_streams_      ? device_streams_->device()
                          : getBoundDeviceId() ? *getBoundDeviceId()
                                               : tensor.device();
  if (tensor.device() != own) {
    throw Error(ErrorKind::kInvalid, std::string(operation) + ": the tensor is on " +
                                         tensor.device().str() + ", and " + name_ + " works on " +
                                         own.str() +
                                         " on this rank; move the tensor, or make "
                                         "another group for that device");
  }
  if (!device_streams_) {
    device_streams_ = std::make_shared<DeviceStreams>(own, connection_.segment);
  }
  device_streams_->require_no_capture(operation);
  DeviceTransfer::free_unused();
  return StagedTensors(device_streams_);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::run(const Call& call, StagedTensors staged,
                                                    const EqualStreams& streams,
                                                    MakeOperation make) {
  queue_->require_owner(call.kind->word());
  check_claims();
  auto profiled = this->profiled(call);
  const auto transfer = staged.take_transfer(streams);
  auto work =
      c10::make_intrusive<WorkHbm>(rank_, call.kind->type, title(call), call.inputs, call.outputs,
                                   queue_, transfer ? transfer->result() : nullptr);
  std::unique_lock issue(issue_mutex_);
  communicator::OperationPtr operation;
  if (transfer) {
    operation = std::make_unique<DeviceOperation>(
        [make = std::move(make), chunks = transfer->chunks(), number = sequence_ + 1](
            size_t index) { return make(chunks.sequence(number), chunks.range(index)); },
        transfer);
    transfer->issue();
  } else {
    operation = make(sequence_ + 1, communicator::kAllElements);
  }
  const uint64_t sequence = ++sequence_;
  if (call.async || coalescing() || !queue_->try_claim(call.kind->word())) {
    return submit(queue_, call, std::move(work), std::move(staged), std::move(operation), sequence,
                  std::move(issue), std::move(profiled));
  }
  issue.unlock();
  const uint64_t entered = enter_in_profile(std::move(profiled), sequence);
  progress::StagingHooks hooks;
  try {
    record(call, sequence);
    hooks = staged.take_hooks(at_end(call, *work, *operation, entered));
  } catch (...) {
    queue_->unclaim();
    throw;
  }
  const uint64_t number = flight_record_->enter(issued(call, sequence));
  try {
    queue_->run_claimed(*operation, timeout_or_default(call.timeout), std::move(hooks));
  } catch (...) {
    if (transfer) transfer->result()->block_after_error();
    throw;
  }
  flight_record_->finish(number);
  work->bind(nullptr, sequence);
  if (transfer) transfer->result()->block_current_stream();
  return work;
}

FlightRecord::Issued ProcessGroupHbm::issued(const Call& call, uint64_t sequence) const {
  const std::vector<at::Tensor>& tensors = call.inputs.empty() ? call.outputs : call.inputs;
  return {.kind = call.kind,
          .sequence = sequence,
          .peer = call.peer,
          .dtype = tensors.empty() ? at::kByte : tensors.front().scalar_type(),
          .input_elements = elements(call.inputs),
          .output_elements = elements(call.outputs),
          .timeout = timeout_or_default(call.timeout)};
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::run_p2p(
    const Call& call, StagedTensors staged,
    const std::function<std::unique_ptr<progress::Operation>(std::shared_ptr<int>)>& make) {
  p2p_queue_->require_owner(call.kind->word());
  check_claims();
  auto transfer = staged.take_transfer({});
  auto work =
      c10::make_intrusive<WorkHbm>(rank_, call.kind->type, title(call), call.inputs, call.outputs,
                                   p2p_queue_, transfer ? transfer->result() : nullptr);
  auto operation = make(work->source());
  PreparedMessage message{p2p_queue_,          call, std::move(staged),
                          std::move(transfer), work, std::move(operation),
                          profiled(call)};
  return coalescing() ? defer(std::move(message)) : begin(std::move(message));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::begin(PreparedMessage message) {
  const bool sends = message.call.kind->type == c10d::OpType::SEND;
  if (message.transfer || (sends && !send_order_->empty())) {
    message.operation = std::make_unique<DeviceOperation>(
        std::move(message.operation), message.transfer,
        sends ? SendOrder::Position(send_order_) : SendOrder::Position());
  }
  return submit(message.queue, message.call, std::move(message.work), std::move(message.staged),
                std::move(message.operation), 0, {}, std::move(message.profiled));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::submit(
    const std::shared_ptr<progress::OperationQueue>& queue, const Call& call,
    c10::intrusive_ptr<WorkHbm> work, StagedTensors staged,
    std::unique_ptr<progress::Operation> operation, uint64_t sequence,
    std::unique_lock<std::mutex> issue, std::optional<Profile::Issued> profiled) {
  const uint64_t entered = enter_in_profile(std::move(profiled), sequence);
  work->profile(entered);
  auto hooks = staged.take_hooks(at_end(call, *work, *operation, entered));
  auto request =
      queue->enqueue(std::move(operation), timeout_or_default(call.timeout), std::move(hooks));
  if (call.kind->recorded != nullptr) flight_record_->enter(issued(call, sequence), request);
  if (issue.owns_lock()) issue.unlock();
  work->bind(request, sequence);
  record(call, sequence);
  queue->launch(request, call.async ? progress::Mode::kAsync : progress::Mode::kSync);
  if (!call.async) work->block_current_stream();
  if (entered != 0) Profile::returned(entered);
  join_batch(work);
  return work;
}

// Reports an operation's arguments to the profiler.
void ProcessGroupHbm::record(const Call& call, uint64_t sequence) const {
  if (!at::hasCallbacks()) return;
  RECORD_PARAM_COMMS_DATA(
      std::make_tuple(static_cast<int64_t>(sequence), c10d::isP2POp(call.kind->type)),
      std::make_tuple(pg_uid_, pg_desc_), call.inputs, call.outputs, rank_, call.kind->word(),
      call.inputs.empty() ? 0 : call.inputs.front().numel(),
      call.outputs.empty() ? 0 : call.outputs.front().numel(),
      call.outputs.empty() ? at::kByte : call.outputs.front().scalar_type(), std::vector<int64_t>(),
      std::vector<int64_t>(), -1, -1, size_);
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
  const auto use = turnstile_.enter(name_);
  if (!queue_) return c10d::ErrorType::SUCCESS;
  const std::exception_ptr error = queue_->broken();
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
  const auto use = turnstile_.enter(name_);
  if (!queue_ || queue_->in_forked_child()) return;
  retire("was aborted");
  close_resource(/*patient=*/false);
}

// Ends the group as it is: pending works fail, and ranks that wait for this one get an error.
void ProcessGroupHbm::retire(const std::string& how) {
  const std::string reason = name_ + " " + how + " on rank " + std::to_string(rank_);
  // A failed group has already notified the other ranks of the cause.
  if (!queue_->broken()) connection_.peers->report_failure(Error(ErrorKind::kAborted, reason));
  abort_hooks_.run(name_);
  queue_->abort(reason);
  p2p_queue_->abort(reason);
}

void ProcessGroupHbm::shutdown() {
  const auto use = turnstile_.enter(name_);
  if (!queue_ || queue_->in_forked_child() || shut_down_.exchange(true)) return;
  const bool all_came = part();
  if (all_came) remove_keys();
  const bool failed = queue_->broken() != nullptr;
  failed ? connection_.peers->finish_reports() : connection_.peers->leave(all_came);
  stop();
  if (failed) connection_.communicator->invalidate();
  close_resource(/*patient=*/true);
}

void ProcessGroupHbm::stop() {
  if (queue_) queue_->stop();
  if (p2p_queue_) p2p_queue_->stop();
  if (connection_.peers) connection_.peers->stop();
}

c10::intrusive_ptr<GroupOptions> ProcessGroupHbm::derived_options(
    const c10::intrusive_ptr<c10d::Backend::Options>& opts, const char* operation) const {
  const auto given = c10::dynamic_intrusive_pointer_cast<GroupOptions>(opts);
  if (opts && !given && opts->backend != options_->backend) {
    throw std::invalid_argument(std::string(operation) +
                                ": the options must be torch_hbmcomm.Options, not those of " +
                                opts->backend);
  }
  auto options = c10::make_intrusive<GroupOptions>(given ? *given : *options_, options_->backend);
  if (!given) options->timeout = opts ? opts->timeout : milliseconds(timeout_ms_.load());
  if (opts && !opts->group_name.empty()) {
    options->group_name = opts->group_name;
  } else {
    options->group_name = options_->group_name;
  }
  return options;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupHbm::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) return nullptr;
  const auto options = derived_options(opts, "split");
  options->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    const auto& global = options_->global_ranks_in_group;
    options->global_ranks_in_group.push_back(global.empty() ? static_cast<uint64_t>(rank)
                                                            : global[static_cast<size_t>(rank)]);
  }
  return c10::make_intrusive<ProcessGroupHbm>(store, static_cast<int>(own - ranks.begin()),
                                              static_cast<int>(ranks.size()), options,
                                              options->group_name);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupHbm::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank, const int& size) {
  const auto options = derived_options(opts, "merge");
  options->global_ranks_in_group.clear();  // each merged job has its own numbers of ranks
  return c10::make_intrusive<ProcessGroupHbm>(store, rank, size, options, options->group_name);
}

bool ProcessGroupHbm::supportsTensorAlloc(c10::DeviceIndex /*device*/) { return true; }

at::Tensor ProcessGroupHbm::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) return at::empty({size}, options);
  const at::ScalarType type = c10::typeMetaToScalarType(options.dtype());
  return c10::isComplexType(type) ? allocate(2 * size, c10::toRealValueType(type))
                                  : allocate(size, type);
}

at::Tensor ProcessGroupHbm::allocate(int64_t size, at::ScalarType type) {
  return translated([&] {
    const auto use = enter();
    return tensor_in(connection_.segment, {size}, type);
  });
}

std::shared_ptr<c10::Allocator> ProcessGroupHbm::getMemAllocator() {
  const auto use = enter();
  return segment_allocator(connection_.segment);
}

std::unordered_map<std::string, uint64_t> ProcessGroupHbm::getMemoryStats() {
  const auto use = enter();
  const memory::SharedSegmentStats segment = connection_.segment->stats();
  const memory::StagingStats staging = connection_.staging->stats();
  const communicator::CommunicatorMemory communicator = connection_.communicator->memory();
  return {{"segment.in_use_bytes", segment.in_use_bytes},
          {"segment.peak_bytes", segment.peak_bytes},
          {"segment.hbm_bytes", segment.hbm_bytes},
          {"segment.ddr_bytes", segment.ddr_bytes},
          {"segment.spills", segment.spills},
          {"segment.page_bytes", segment.page_bytes},
          {"slots.bytes", communicator.slots_bytes},
          {"staging.budget_bytes", staging.budget_bytes},
          {"staging.reserved_bytes", staging.reserved_bytes},
          {"staging.kept_bytes", staging.cached_bytes},
          {"staging.overflow_bytes", staging.overflow_bytes},
          {"staging.abandoned_bytes", communicator.orphaned_bytes}};
}

std::vector<std::string> ProcessGroupHbm::gather_texts(
    const std::string& step, const std::function<std::string()>& own_text) {
  const auto use = enter();
  bootstrap::Participant participant = connection_.rendezvous.participant;
  participant.deadline = progress::Clock::now() + std::chrono::milliseconds(timeout_ms_.load());
  return translated(
      [&] { return bootstrap::gather(participant, step, bootstrap::everyone(size_), own_text); });
}

std::vector<std::string> ProcessGroupHbm::networks() const {
  const auto use = enter();
  std::vector<std::string> networks;
  for (const bootstrap::Member& member : connection_.rendezvous.members) {
    networks.push_back(member.boot_id + "/" + member.network_namespace + "/" + member.forced_node);
  }
  return networks;
}

void ProcessGroupHbm::attach(std::shared_ptr<GroupResource> resource) {
  std::unique_lock lock(resource_mutex_);
  resource_ = resource;
  const bool ended = ended_;
  lock.unlock();
  if (ended) resource->close(/*patient=*/false);
}

std::shared_ptr<GroupResource> ProcessGroupHbm::resource() const {
  const std::lock_guard lock(resource_mutex_);
  return resource_;
}

// Does nothing in a forked child: the parent closes the resource.
void ProcessGroupHbm::close_resource(bool patient) {
  if (!queue_ || queue_->in_forked_child()) return;
  std::unique_lock lock(resource_mutex_);
  const std::shared_ptr<GroupResource> resource = std::exchange(ended_, true) ? nullptr : resource_;
  lock.unlock();
  if (resource) resource->close(patient);
}

}  // namespace hbm::process_group
