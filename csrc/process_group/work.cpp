#include "process_group/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "base/error.h"
#include "process_group/options.h"
#include "process_group/profile.h"
#include "process_group/types.h"

namespace hbm::process_group {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> tensor_list_future(const DeviceResult* on_device) {
  std::vector<c10::Device> devices;
  if (on_device != nullptr) devices.push_back(on_device->device());
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                  std::move(devices));
}

// Completes a future. The future records an event on the current stream of each device, for its
// waiters. So the stream of results on a device is made the current stream first.
void complete(c10::ivalue::Future& future, std::vector<at::Tensor> outputs,
              const DeviceResult* on_device) {
  c10::OptionalStreamGuard guard;
  if (on_device != nullptr) guard.reset_stream(on_device->stream());
  future.markCompleted(c10::IValue(std::move(outputs)));
}

// Completes a future on a worker, which has no caller to throw to.
void complete_or_fail(c10::ivalue::Future& future, std::vector<at::Tensor> outputs,
                      const DeviceResult* on_device) {
  try {
    complete(future, std::move(outputs), on_device);
  } catch (const std::exception&) {  // errors of the device
    future.setErrorIfNeeded(std::current_exception());
  }
}

// Returns the text at an address that stays valid.
const char* kept(const std::string& text) {
  static std::mutex mutex;
  static auto* const texts = new std::set<std::string>;  // never destroyed: works may outlive it
  const std::lock_guard lock(mutex);
  return texts->insert(text).first->c_str();
}

// A c10d::Work without an operation, made for its profiler range.
class WorkRange final : public c10d::Work {
 public:
  WorkRange(const char* title, const std::vector<at::Tensor>& inputs)
      : Work(-1, c10d::OpType::UNKNOWN, title, inputs) {}
  std::function<void()> end() { return recordFunctionEndCallback_; }
};

}  // namespace

WorkHbm::WorkHbm(int rank, c10d::OpType type, const char* title,
                 const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs,
                 std::shared_ptr<progress::OperationQueue> queue,
                 std::shared_ptr<const DeviceResult> on_device)
    : Work(rank, type, title, inputs),
      outputs_(std::move(outputs)),
      queue_(std::move(queue)),
      on_device_(std::move(on_device)) {}

const char* range_title(const std::string& backend, const OperationKind& kind) {
  if (!at::hasCallbacks()) return nullptr;
  if (backend == kBackendName) return kind.name;
  if (backend == kGlooName) return kind.gloo;
  return kept(backend + ":" + kind.word());
}

void WorkHbm::bind(std::shared_ptr<progress::Request> request, uint64_t sequence) {
  request_ = std::move(request);
  sequence_ = sequence;
}

bool WorkHbm::isCompleted() {
  return (done() || queue_->test(request_)) && (!on_device_ || on_device_->finished());
}

bool WorkHbm::isSuccess() const { return done() && exception() == nullptr; }

std::exception_ptr WorkHbm::exception() const {
  if (!request_ || !request_->done() || !request_->error()) return nullptr;
  return to_torch(request_->error());
}

std::vector<at::Tensor> WorkHbm::result() {
  TORCH_CHECK(done(), "result() was called before the operation was complete; call wait()");
  return outputs_;
}

void WorkHbm::block_current_stream() const {
  if (on_device_ && done()) on_device_->block_current_stream();
}

bool WorkHbm::wait(std::chrono::milliseconds timeout) {
  if (!request_) {
    block_current_stream();
    return true;
  }
  const auto deadline =
      timeout == kNoTimeout ? progress::Clock::time_point::max() : progress::Clock::now() + timeout;
  const int64_t begin = profiled_ != 0 && !request_->done() ? Profile::now() : 0;
  if (begin != 0) Profile::wait_begins(profiled_);
  const bool done = queue_->wait(request_, deadline);
  if (begin != 0) Profile::waited(profiled_, begin);
  TORCH_CHECK_WITH(DistBackendError, done, "wait() timed out after ", timeout.count(),
                   " ms; the operation (", c10d::opTypeToString(opType_), " #", sequence_,
                   " on rank ", rank_, ") goes on", progress::torch_timeout_words(timeout));
  if (request_->error()) {
    if (on_device_) on_device_->block_after_error();
    std::rethrow_exception(exception());
  }
  block_current_stream();
  return true;
}

void WorkHbm::abort() { queue_->abort("Work.abort() was called on rank " + std::to_string(rank_)); }

c10::intrusive_ptr<c10::ivalue::Future> WorkHbm::getFuture() {
  {
    const std::lock_guard lock(future_mutex_);
    if (future_) return future_;
    future_ = tensor_list_future(on_device_.get());
  }
  if (!request_) {
    complete(*future_, outputs_, on_device_.get());
    return future_;
  }
  // The callback holds no reference to this work, because the references would form a cycle.
  queue_->when_done(request_, [future = future_, request = request_, outputs = outputs_,
                               on_device = on_device_]() mutable {
    if (request->error()) {
      future->setError(to_torch(request->error()));
    } else {
      complete_or_fail(*future, std::move(outputs), on_device.get());
    }
  });
  return future_;
}

std::function<void()> range_of_parts(const char* title, const std::vector<at::Tensor>& inputs) {
  if (title == nullptr) return [] {};
  const auto range = c10::make_intrusive<WorkRange>(title, inputs);
  const auto left = std::make_shared<std::atomic<size_t>>(inputs.size());
  return [left, end = range->end()] {
    if (left->fetch_sub(1) == 1 && end) end();
  };
}

WorkAll::WorkAll(int rank, c10d::OpType type, std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : Work(rank, type), works_(std::move(works)) {}

bool WorkAll::isCompleted() {
  for (const auto& work : works_) {
    if (!work->isCompleted()) return false;
  }
  return true;
}

bool WorkAll::isSuccess() const {
  for (const auto& work : works_) {
    if (!work->isSuccess()) return false;
  }
  return true;
}

std::exception_ptr WorkAll::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

std::vector<at::Tensor> WorkAll::result() {
  std::vector<at::Tensor> tensors;
  for (const auto& work : works_) {
    for (auto& tensor : work->result()) tensors.push_back(tensor);
  }
  return tensors;
}

bool WorkAll::wait(std::chrono::milliseconds timeout) {
  const auto start = progress::Clock::now();
  for (const auto& work : works_) {
    if (timeout == kNoTimeout) {
      work->wait();
    } else {
      const auto left = timeout - std::chrono::duration_cast<std::chrono::milliseconds>(
                                      progress::Clock::now() - start);
      work->wait(std::max(left, std::chrono::milliseconds(1)));
    }
  }
  return true;
}

void WorkAll::abort() {
  for (const auto& work : works_) work->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> WorkAll::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures)->then(
      [](c10::ivalue::Future& all) -> c10::IValue {
        std::vector<at::Tensor> tensors;
        for (const auto& each : all.value().toList().vec()) {
          for (const at::Tensor& tensor : each.toFuture()->value().toTensorVector()) {
            tensors.push_back(tensor);
          }
        }
        return tensors;
      },
      c10::ListType::create(c10::TensorType::get()));
}

uint64_t WorkAll::getSequencenumber() const {
  return works_.empty() ? 0 : works_.back()->getSequencenumber();
}

}  // namespace hbm::process_group
