// The process group "hbm": a c10d backend whose collectives use shared high-bandwidth memory within
// a node, and MPI between nodes. docs/design/README.md describes its parts.
//
// A group has a communicator, which makes the operations, and two queues, which run them. One queue
// runs the collectives, in the order of issue. The other queue runs all point-to-point operations
// at the same time. Arguments are checked before anything is sent. A later error of a collective
// breaks the group: the rank reports the error to the other ranks, and their waits end.
// docs/failures.md lists the other causes that break a group.
//
// Threads: every member may be called from any thread. A thread holds issue_mutex_ while it gives
// an operation its sequence number and its position in the queue, so that both have the same order.
// No thread holds issue_mutex_ during a wait.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "communicator/communicator.h"
#include "communicator/connect/connect.h"
#include "process_group/abort_hooks.h"
#include "process_group/checks.h"
#include "process_group/coalescing.h"
#include "process_group/device_operation.h"
#include "process_group/device_streams.h"
#include "process_group/flight_record.h"
#include "process_group/options.h"
#include "process_group/profile.h"
#include "process_group/reconfiguration.h"
#include "process_group/staged_tensors.h"
#include "process_group/torch_version.h"
#include "process_group/turnstile.h"
#include "process_group/types.h"
#include "process_group/work.h"
#include "progress/operation_queue.h"

namespace hbm::process_group {

// A resource of a group, closed when the group ends.
class GroupResource {
 public:
  virtual ~GroupResource() = default;

  // Called once, by any thread, when the group has ended for this rank. The caller holds no lock.
  // `patient` is true in destroy_process_group: resources that other ranks still need may stay
  // until those ranks are done. `patient` is false if the group was aborted, or is destroyed
  // implicitly. May throw; destroy_process_group passes the exception on.
  virtual void close(bool patient) = 0;
};

class ProcessGroupHbm final : public BackendBase {
 public:
  // Meets the other ranks in `store` and connects. Throws PyTorch errors if a rank is missing at
  // the timeout, the ranks' options differ, or there is no MPI library.
  ProcessGroupHbm(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  c10::intrusive_ptr<GroupOptions> options, std::string name);
  ~ProcessGroupHbm() override;

  // Returns "hbm", or the name of the backend that this group replaces (HBMCOMM_INSTEAD_OF).
  const std::string getBackendName() const override { return options_->backend; }
  // Returns a copy: splitGroup() and mergeRemoteGroup() write the new group's name and timeout into
  // it.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<GroupOptions>(*options_);
  }

  // process_group/data_movement.cpp
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather_single(at::Tensor& output, at::Tensor& input,
                                               const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;

  // process_group/reductions.cpp
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override;

  // process_group/point_to_point.cpp, with barriers
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // process_group/coalescing.cpp. endCoalescing() throws the error of the first call of the batch
  // that was refused; an empty batch never throws.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  // Drops this thread's batch, if any: its messages never begin.
  void drop_batch();

  // pg_hbm.cpp: life cycle, state, memory
  void setSequenceNumberForGroup() override {}  // starts at 0 on every rank
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  // Called by c10d::ProcessGroup::splitGroup(), which is ProcessGroup.split_group() in Python.
  // (torch.distributed.split_group() calls this for a group of several devices, and refuses a group
  // of CPUs alone; torch_hbmcomm.split_group() makes a new group.) Returns null for a rank outside
  // of `ranks`.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  // Called by c10d::ProcessGroup::mergeRemoteGroup(), which is ProcessGroup.merge_remote_group() in
  // Python. Makes the group of all ranks that meet in `store`; `size` is the number of these ranks.
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;
  void enableCollectivesTiming() override {}  // nothing to enable, as in Gloo
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  // Returns a tensor of `size` elements; on the CPU, it is in the group's segment. For a complex
  // type, a tensor on the CPU has 2 * `size` real numbers instead. The reason is DDP, the only
  // caller from C++: it views a bucket of complex gradients as real numbers.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  // Returns a tensor of `size` elements in the group's segment; complex numbers stay complex.
  at::Tensor allocate(int64_t size, at::ScalarType type);
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;

  // process_group/reconfigure.cpp
  //
  // With enable_reconfigure the constructor connects no ranks. Each reconfigure() then forms the
  // group in place, of the processes whose handles it names; until the first one, every operation
  // throws. If the members do not meet, the group stays as it was. If a member fails after that,
  // the call throws on every member, the group stays aborted, and another call may form it. Works
  // in flight fail with Error(kAborted) once all members have met. Threads: a thread that is in a
  // call of the group when reconfigure() ends its members gets an error.
  bool supportsReconfigure() const override { return reconfiguration_ != nullptr; }
  ReconfigureHandle get_reconfigure_handle() const override;
  c10::intrusive_ptr<c10d::Work> reconfigure(const ReconfigureOptions& opts) override;
  // Makes the group of the ranks that are not excluded. All of these ranks call it. They meet in
  // the store of this group. Then aborts this group; aborts it first if `shrink_flags` has
  // SHRINK_ABORT.
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) override;
  // Each hook is called once when the group fails or is aborted on this rank, before pending works
  // get their error; again after a reconfigure(). The thread that has found the failure calls it.
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t hook_id, AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;

  // process_group/window.cpp
  //
  // A window lets ranks write to one another's memory (process_group/window.h). A group has windows
  // if all its ranks share memory. new_window() is collective if it gets a tensor, which it then
  // registers. Throws Error(kUnsupported), naming the other ranks, if some share no memory with
  // this rank.
  bool supportsWindow() const override;
  c10::intrusive_ptr<Window> new_window(const std::optional<at::Tensor>& tensor) override;

  // The next functions are for resources of the group (torch_hbmcomm/group_boxes.py).
  //
  // Runs bootstrap::gather over the group's ranks, within its timeout. Use each step's name only
  // once.
  std::vector<std::string> gather_texts(const std::string& step,
                                        const std::function<std::string()>& own_text);
  // Returns a text for each rank. Two ranks have equal texts if they can reach one another at
  // 127.0.0.1 and have the same HBMCOMM_NODE_ID.
  std::vector<std::string> networks() const;
  // Closes `resource` when the group ends; immediately, with `patient` false, if it has ended.
  // REQUIRES: there is no resource yet.
  void attach(std::shared_ptr<GroupResource> resource);
  std::shared_ptr<GroupResource> resource() const;  // null: none; the group may have ended

 private:
  friend class WindowHbm;  // operations of a window are operations of the group

  // The arguments that collectives and messages have in common, and the peer of a message.
  struct Call {
    const OperationKind* kind;
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    std::chrono::milliseconds timeout;
    bool async;
    // Called at the end of a part of a coalesced call, which has one profiler range for all parts.
    // Empty if the operation has its own range.
    std::function<void()> part_done = {};
    int peer = -1;  // the peer of a message; -1: any rank
  };
  // A message after its checks and before its begin.
  struct PreparedMessage {
    std::shared_ptr<progress::OperationQueue> queue;
    Call call;
    StagedTensors staged;
    std::shared_ptr<DeviceTransfer> transfer;
    c10::intrusive_ptr<WorkHbm> work;
    communicator::OperationPtr operation;
    std::optional<Profile::Issued> profiled;
  };
  // Makes a collective's operation. `part` is the range of elements of each of the operation's
  // equal streams (process_group/chunks.h). The function outlives the call that made it.
  using MakeOperation = std::function<communicator::OperationPtr(
      const communicator::OperationNumber& sequence, communicator::ElementRange part)>;
  // The arguments of run(): a collective after its checks and before its begin.
  struct Collective {
    Call call;
    StagedTensors staged;
    EqualStreams streams;
    MakeOperation make;
  };

  // Returns an empty StagedTensors for tensors on the device of `tensor`. Throws Error(kInvalid),
  // naming `operation`, if the group works on another accelerator. Throws as
  // DeviceStreams::require_no_capture().
  StagedTensors stage(const at::Tensor& tensor, const char* operation);

  // Returns call(), or throws its error as PyTorch's. Within a batch an error is stored for
  // endCoalescing(), and later calls do nothing.
  template <class Call>
  c10::intrusive_ptr<c10d::Work> guarded(Call&& call) {
    if (auto refused = refused_in_batch(nullptr)) return refused;
    try {
      const auto use = enter();
      return call();
    } catch (...) {
      const std::exception_ptr error = to_torch(std::current_exception());
      if (auto refused = refused_in_batch(error)) return refused;
      std::rethrow_exception(error);
    }
  }

  // Gives a collective its sequence number and its position in the queue, and starts it. A
  // synchronous collective is done on return. For tensors on a device, calls `make` for each chunk
  // if `streams` are equal on all ranks, else once for all elements.
  c10::intrusive_ptr<c10d::Work> run(const Call& call, StagedTensors staged,
                                     const EqualStreams& streams, MakeOperation make);
  c10::intrusive_ptr<c10d::Work> run(Collective collective) {
    return run(collective.call, std::move(collective.staged), collective.streams,
               std::move(collective.make));
  }
  // Runs the collectives of a coalesced call.
  c10::intrusive_ptr<c10d::Work> run_all(std::vector<Collective> collectives, c10d::OpType type);
  // Runs a synchronous allreduce on the calling thread, which claims the idle queue. Returns null
  // if it cannot claim the queue, or if the communicator does not preallocate the allreduce.
  c10::intrusive_ptr<c10d::Work> allreduce_inline(std::vector<at::Tensor>& tensors, Dtype dtype,
                                                  ReduceOp op, const c10d::AllreduceOptions& opts);
  // The next functions check the arguments of one collective and return it. `part_done` is not
  // empty if the collective is a part of a coalesced call.
  Collective allgather_part(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                            const c10d::AllgatherOptions& opts,
                            const std::function<void()>& part_done);
  Collective allgather_base_part(const at::Tensor& output, const at::Tensor& input,
                                 const c10d::AllgatherOptions& opts,
                                 const std::function<void()>& part_done);
  Collective reduce_scatter_base_part(const at::Tensor& output, const at::Tensor& input,
                                      const c10d::ReduceScatterOptions& opts);
  // Begins a point-to-point operation. Within a batch, the operation begins at the end of the
  // batch.
  c10::intrusive_ptr<c10d::Work> run_p2p(
      const Call& call, StagedTensors staged,
      const std::function<std::unique_ptr<progress::Operation>(std::shared_ptr<int> source)>& make);
  c10::intrusive_ptr<c10d::Work> begin(PreparedMessage message);
  c10::intrusive_ptr<c10d::Work> submit(const std::shared_ptr<progress::OperationQueue>& queue,
                                        const Call& call, c10::intrusive_ptr<WorkHbm> work,
                                        StagedTensors staged,
                                        std::unique_ptr<progress::Operation> operation,
                                        uint64_t sequence, std::unique_lock<std::mutex> issue,
                                        std::optional<Profile::Issued> profiled);
  // Runs an allreduce on the calling thread if the group is idle. Returns its sequence number, or
  // nothing.
  std::optional<uint64_t> reduce_inline(const at::Tensor& tensor, Dtype dtype, ReduceOp op,
                                        std::chrono::milliseconds timeout);
  void record(const Call& call, uint64_t sequence) const;

  // process_group/profiled_operations.cpp
  //
  // Returns the call as an entry of the profile; nothing if no profile is recorded.
  std::optional<Profile::Issued> profiled(const OperationKind& kind, int peer, bool async,
                                          std::span<const at::Tensor> inputs,
                                          std::span<const at::Tensor> outputs) const {
    if (!Profile::on()) return std::nullopt;
    return describe_for_profile(kind, peer, async, inputs, outputs);
  }
  std::optional<Profile::Issued> profiled(const Call& call) const {
    return profiled(*call.kind, call.peer, call.async, call.inputs, call.outputs);
  }
  Profile::Issued describe_for_profile(const OperationKind& kind, int peer, bool async,
                                       std::span<const at::Tensor> inputs,
                                       std::span<const at::Tensor> outputs) const;
  // Enters the operation in the profile. Returns its number there; 0: none.
  static uint64_t enter_in_profile(std::optional<Profile::Issued> profiled, uint64_t sequence) {
    if (!profiled) return 0;
    profiled->sequence = sequence;
    return Profile::issue(std::move(*profiled));
  }
  std::shared_ptr<const Profile::Group> describe_group_for_profile() const;
  // Returns the epilogue of `operation` (StagingHooks), which enters its end in the profile.
  static std::function<void()> at_end(const Call& call, WorkHbm& work,
                                      const progress::Operation& operation, uint64_t profiled);
  // Returns the title of the call's profiler range; null if it has none.
  const char* title(const Call& call) const {
    return call.part_done ? nullptr : range_title(options_->backend, *call.kind);
  }

  // Returns true if this thread has called startCoalescing() and not yet endCoalescing().
  bool coalescing();
  // Calls `use` with this thread's batch, under coalescing_mutex_. Returns false if there is none.
  template <class Use>
  bool with_batch(const Use& use);
  CoalescedBatch take_batch();
  void join_batch(const c10::intrusive_ptr<WorkHbm>& work);
  // Stores `error` as the refusal of this thread's batch, if `error` is not null and the batch has
  // no refusal yet. Returns a Work that has failed with the batch's refusal; null if there is no
  // batch or no refusal.
  c10::intrusive_ptr<c10d::Work> refused_in_batch(const std::exception_ptr& error);
  c10::intrusive_ptr<c10d::Work> defer(PreparedMessage message);

  // Returns the other ranks whose memory this rank cannot access, ascending.
  std::vector<int> ranks_apart() const;
  // Throws Error(kAborted), naming `operation`, if the group has failed or was aborted.
  void require_intact(const char* operation) const;

  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  int check_root(int64_t root, const char* operation) const;
  void check_list(size_t found, const char* operation, const char* argument) const;
  void check_peer(int peer, int tag, const char* operation) const;
  void check_tag(int tag, const char* operation) const;
  std::vector<at::Tensor> root_list(const std::vector<std::vector<at::Tensor>>& lists, int root,
                                    const char* operation, const char* argument,
                                    const at::Tensor& own) const;
  c10::intrusive_ptr<c10d::Work> receive(std::vector<at::Tensor>& tensors, int from, int tag,
                                         const OperationKind& kind);
  communicator::Source reduction_input(StagedTensors& staged, const at::Tensor& tensor,
                                       const c10d::ReduceOp& op);
  communicator::Sink reduction_in_place(StagedTensors& staged, const at::Tensor& tensor,
                                        const c10d::ReduceOp& op);

  // Returns the options of a group derived from this group: `opts`, or this group's options if
  // `opts` is null.
  c10::intrusive_ptr<GroupOptions> derived_options(
      const c10::intrusive_ptr<c10d::Backend::Options>& opts, const char* operation) const;
  communicator::connect::GroupConnection connect(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      const std::vector<uint64_t>& members, std::chrono::steady_clock::time_point deadline) const;
  void take(communicator::connect::GroupConnection made);
  void require_no_boxes() const;
  void require_reconfigurable(const char* function) const;
  void retire(const std::string& how);
  void replace(communicator::connect::GroupConnection made, const NextGroup& next);
  // Begins a call that uses the members below `turnstile_`. Throws Error(kInvalid) before the first
  // reconfigure() of a group that needs one, and as Turnstile::enter().
  Turnstile::Entry enter() const;
  progress::OperationQueue::Hooks hooks(
      std::function<void(const std::exception_ptr& error)> failed);
  // Returns the call as an entry of the flight record.
  FlightRecord::Issued issued(const Call& call, uint64_t sequence) const;
  // Writes the flight record after a timeout, of this rank or another.
  void trace(const Error& error) const;
  void check_claims();
  void collective_failed(const std::exception_ptr& error);
  void p2p_failed(const std::exception_ptr& error);
  bool part();
  void remove_keys();
  void stop();
  void leave_all();
  void close_resource(bool patient);
  std::string missing_ranks(const std::vector<int>& ranks) const;

  const c10::intrusive_ptr<GroupOptions> options_;
  const std::string name_;
  std::mutex reconfigure_mutex_;                      // held during reconfigure(); taken first
  std::unique_ptr<Reconfiguration> reconfiguration_;  // null: the ranks stay the same
  AbortHooks abort_hooks_;
  // While it is closed, reconfigure() exchanges the members down to p2p_queue_, and the counters.
  mutable Turnstile turnstile_;

  c10::intrusive_ptr<c10d::Store> store_;
  communicator::connect::GroupConnection connection_;
  std::shared_ptr<const Profile::Group> profiled_group_;
  std::optional<FlightRecord> flight_record_;        // never empty after construction
  std::shared_ptr<progress::OperationQueue> queue_;  // of collectives
  std::shared_ptr<progress::OperationQueue> p2p_queue_;
  std::atomic<bool> shut_down_{false};

  mutable std::mutex resource_mutex_;  // guards the next two members; taken alone
  std::shared_ptr<GroupResource> resource_;
  bool ended_ = false;

  std::mutex device_mutex_;  // guards device_streams_; taken alone
  // The streams of the group's accelerator. The group was bound to that accelerator, or its first
  // device tensor was on it.
  std::shared_ptr<DeviceStreams> device_streams_;
  const std::shared_ptr<SendOrder> send_order_ = std::make_shared<SendOrder>();

  std::mutex issue_mutex_;
  uint64_t sequence_ = 0;  // guarded by issue_mutex_
  uint64_t barriers_ = 0;  // number of monitored barriers; guarded by issue_mutex_
  uint64_t windows_ = 0;   // number of windows made; guarded by issue_mutex_
  std::atomic<int64_t> timeout_ms_;

  std::mutex coalescing_mutex_;  // guards batches_; taken alone
  std::map<std::thread::id, CoalescedBatch> batches_;
  std::atomic<size_t> batch_count_{0};  // relaxed: a thread needs only its own change
};

}  // namespace hbm::process_group
