// The point-to-point operations and barriers of the process group.
#include <utility>

#include "base/error.h"
#include "pg_hbm.h"
#include "process_group/monitored_barrier.h"
#include "process_group/types.h"

namespace hbm::process_group {

using communicator::ElementRange;
using communicator::OperationNumber;
using communicator::Sink;
using communicator::Source;

using std::chrono::milliseconds;

void ProcessGroupHbm::check_peer(int peer, int tag, const char* operation) const {
  check_root(peer, operation);
  if (peer == rank_) {
    throw Error(ErrorKind::kInvalid, std::string(operation) + ": rank " + std::to_string(rank_) +
                                         " cannot be its own peer");
  }
  check_tag(tag, operation);
}

void ProcessGroupHbm::check_tag(int tag, const char* operation) const {
  if (size_ == 1) {
    throw Error(ErrorKind::kInvalid,
                std::string(operation) + ": " + name_ + " has one rank, which has no peer");
  }
  const int tags = connection_.communicator->tags();
  if (tag < 0 || tag >= tags) {
    throw Error(ErrorKind::kInvalid, std::string(operation) + ": tag " + std::to_string(tag) +
                                         " is not between 0 and " + std::to_string(tags - 1) +
                                         ", the tags that groups of this kind have");
  }
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::send(std::vector<at::Tensor>& tensors, int to,
                                                     int tag) {
  return guarded([&] {
    const at::Tensor& tensor = single(tensors, "send");
    check_peer(to, tag, "send");
    StagedTensors staged = stage(tensor, "send");
    const Source in = staged.input(tensor);
    const Dtype dtype = to_dtype(tensor.scalar_type());
    return run_p2p({&operations::kSend, tensors, {}, c10d::kUnsetTimeout, true, {}, to},
                   std::move(staged), [&](const std::shared_ptr<int>&) {
                     return connection_.communicator->send(in, dtype, to, tag);
                   });
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::receive(std::vector<at::Tensor>& tensors, int from,
                                                        int tag, const OperationKind& kind) {
  const at::Tensor& tensor = single(tensors, "recv");
  StagedTensors staged = stage(tensor, "recv");
  const Sink out = staged.output(tensor);
  const Dtype dtype = to_dtype(tensor.scalar_type());
  return run_p2p({&kind, tensors, tensors, c10d::kUnsetTimeout, true, {}, from}, std::move(staged),
                 [&](std::shared_ptr<int> source) {
                   return connection_.communicator->receive(out, dtype, from, tag,
                                                            std::move(source));
                 });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::recv(std::vector<at::Tensor>& tensors, int from,
                                                     int tag) {
  return guarded([&] {
    check_peer(from, tag, "recv");
    return receive(tensors, from, tag, operations::kReceive);
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::recvAnysource(std::vector<at::Tensor>& tensors,
                                                              int tag) {
  return guarded([&] {
    check_tag(tag, "recv");
    return receive(tensors, communicator::kAnyRank, tag, operations::kReceiveFromAny);
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHbm::barrier(const c10d::BarrierOptions& opts) {
  return guarded([&] {
    return run({&operations::kBarrier, {}, {}, opts.timeout, opts.asyncOp}, StagedTensors(), {},
               [communicator = connection_.communicator](const OperationNumber& sequence,
                                                         ElementRange /*all*/) {
                 return communicator->barrier(sequence);
               });
  });
}

void ProcessGroupHbm::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  translated([&] {
    const auto use = enter();
    uint64_t number = 0;
    {
      const std::lock_guard lock(issue_mutex_);
      number = ++barriers_;
    }
    const milliseconds timeout = timeout_or_default(opts.timeout);
    bootstrap::Participant participant = connection_.rendezvous.participant;
    participant.deadline = progress::Clock::now() + timeout;
    MonitoredBarrier(std::move(participant), number, *connection_.peers, timeout, wait_all_ranks)
        .pass();
  });
}

}  // namespace hbm::process_group
