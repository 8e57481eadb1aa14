#include "process_group/window.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "memory/policy.h"
#include "process_group/checks.h"
#include "process_group/operations.h"
#include "process_group/python_lock.h"
#include "process_group/staged_tensors.h"
#include "process_group/types.h"

namespace hbm::process_group {

using communicator::SharedWindow;
using communicator::Source;
using communicator::WindowPart;

namespace {

constexpr size_t kMostWindowDimensions = 64;
constexpr size_t kWindowRefusalBytes = 1000;

// Keeps a tensor to which other ranks may still write until the process ends. `why` names the group
// and the cause, for the log.
void keep_written_tensor(const std::string& why, at::Tensor tensor) {
  log::info(why +
            ", so other ranks may still write to its tensor; the tensor stays allocated until this "
            "process ends");
  static std::mutex mutex;
  static auto* const kept = new std::vector<at::Tensor>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(tensor));
}

// Returns the work, after its end if `async` is false. Ctrl-C ends the wait, and not the operation.
c10::intrusive_ptr<c10d::Work> ended_unless(bool async, c10::intrusive_ptr<c10d::Work> work) {
  if (!async) work->wait();
  return work;
}

bool share_bytes(const void* one, const void* other, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(one);
  const auto second = reinterpret_cast<uintptr_t>(other);
  return first < second + bytes && second < first + bytes;
}

void check_channel(int channel, const char* operation) {
  if (channel >= 0 && channel < communicator::kSignalChannels) return;
  throw Error(ErrorKind::kInvalid, std::string(operation) + ": there is no channel " +
                                       std::to_string(channel) + "; the channels are 0 to " +
                                       std::to_string(communicator::kSignalChannels - 1));
}

}  // namespace

struct WindowHbm::Announcement {
  enum class Call : int64_t { kRegister, kDeregister };

  Call call = Call::kRegister;
  uint64_t window = 0;  // the number of the window in the group
  WindowPart part{};
  int64_t type = 0;  // an at::ScalarType
  int64_t dimensions = 0;
  std::array<int64_t, kMostWindowDimensions> sizes{};
  std::array<char, kWindowRefusalBytes> refusal{};  // the rank's error; empty: none

  std::string describe() const {
    return std::string(call == Call::kRegister ? "tensor_register" : "tensor_deregister") +
           " of window " + std::to_string(window);
  }
};

// A change of a window's registration, by one thread at a time.
class WindowHbm::Change {
 public:
  Change(WindowHbm& window, const char* operation) : window_(window) {
    const std::lock_guard lock(window.mutex_);
    if (window.changing_) {
      throw Error(ErrorKind::kInvalid,
                  std::string(operation) +
                      ": another thread is registering or deregistering the tensor of this window; "
                      "let one thread of each rank do it");
    }
    window.changing_ = true;
  }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;
  ~Change() {
    const std::lock_guard lock(window_.mutex_);
    window_.changing_ = false;
  }

 private:
  WindowHbm& window_;
};

bool ProcessGroupHbm::supportsWindow() const {
  return translated([&] {
    const auto use = turnstile_.enter(name_);
    return connection_.communicator && options_->transport != bootstrap::GroupTransport::kMpi &&
           ranks_apart().empty();
  });
}

c10::intrusive_ptr<Window> ProcessGroupHbm::new_window(const std::optional<at::Tensor>& tensor) {
  return translated([&]() -> c10::intrusive_ptr<Window> {
    const auto use = enter();
    queue_->require_owner("new_window");
    require_intact("new_window");
    if (options_->transport == bootstrap::GroupTransport::kMpi) {
      throw Error(
          ErrorKind::kUnsupported,
          "new_window: the ranks of " + name_ +
              " share no memory, because its transport is \"mpi\" (the option transport, or "
              "HBMCOMM_NODE); make a group with transport \"auto\" or \"shm\"");
    }
    if (const std::vector<int> apart = ranks_apart(); !apart.empty()) {
      throw Error(ErrorKind::kUnsupported,
                  "new_window: rank " + std::to_string(rank_) + " of " + name_ +
                      " shares no memory with the ranks " + connection_.peers->list(apart) +
                      "; a window needs all ranks of its group on one node: make a group of the "
                      "ranks of each node");
    }
    std::unique_lock issue(issue_mutex_);
    const uint64_t number = ++windows_;
    issue.unlock();
    auto window = c10::make_intrusive<WindowHbm>(
        c10::intrusive_ptr<ProcessGroupHbm>::unsafe_reclaim_from_nonowning(this), number);
    if (tensor) window->tensor_register(*tensor, /*owning=*/true);
    return window;
  });
}

std::vector<int> ProcessGroupHbm::ranks_apart() const {
  const std::vector<int> shared = connection_.communicator->memory_ranks();
  std::vector<int> apart;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && !std::ranges::binary_search(shared, rank)) apart.push_back(rank);
  }
  return apart;
}

void ProcessGroupHbm::require_intact(const char* operation) const {
  const std::exception_ptr why = queue_->broken();
  if (!why) return;
  try {
    std::rethrow_exception(why);
  } catch (const std::exception& error) {
    throw Error(
        ErrorKind::kAborted,
        std::string(operation) + " was refused because the group failed earlier: " + error.what());
  }
}

WindowHbm::WindowHbm(c10::intrusive_ptr<ProcessGroupHbm> group, uint64_t number)
    : group_(std::move(group)), communicator_(group_->connection_.communicator), number_(number) {}

// The destructor of the group waits for the group's threads, which may need Python's lock.
WindowHbm::~WindowHbm() {
  if (registration_ && registration_->tensor.defined()) {
    keep_written_tensor(group_->name_ + ": a window was dropped without tensor_deregister()",
                        registration_->tensor);
  }
  without_python_lock([this] { group_.reset(); });
}

void WindowHbm::require_group(const char* operation) const {
  group_->queue_->require_owner(operation);
  if (group_->connection_.communicator != communicator_) {
    throw Error(ErrorKind::kAborted, std::string(operation) + ": the window is of the ranks that " +
                                         group_->name_ +
                                         " had before reconfigure(); make another by new_window()");
  }
  group_->require_intact(operation);
}

void WindowHbm::require_no_batch(const char* operation) const {
  if (!group_->coalescing()) return;
  throw Error(ErrorKind::kInvalid,
              std::string(operation) +
                  " was called within a batch (startCoalescing), and it waits for its end before "
                  "the batch begins; call it before the batch or after it, or a put, signal or "
                  "wait_signal with async_op=True");
}

WindowHbm::RegistrationPtr WindowHbm::registered(const char* operation) const {
  require_group(operation);
  const std::lock_guard lock(mutex_);
  if (registration_) return registration_;
  throw Error(ErrorKind::kInvalid,
              std::string(operation) +
                  ": the window is not registered; call tensor_register() on all ranks first");
}

// Checks the tensor to register, and makes this rank's part of the window.
std::shared_ptr<SharedWindow> WindowHbm::make_part(const at::Tensor& tensor) const {
  check_tensor(tensor, "tensor_register: the argument");
  const std::string policy = memory::policy_name(group_->options_->policy);
  const std::string remedy =
      "register a tensor of torch_hbmcomm.memory.empty(shape, dtype, \"" + policy + "\")";
  if (!tensor.is_cpu()) {
    throw Error(ErrorKind::kUnsupported, "tensor_register: the tensor is on " +
                                             tensor.device().str() +
                                             ", and a window is memory of the CPU; " + remedy);
  }
  to_dtype(tensor.scalar_type());
  if (c10::isQIntType(tensor.scalar_type())) {
    throw Error(ErrorKind::kUnsupported, std::string("tensor_register: the tensor is quantized (") +
                                             c10::toString(tensor.scalar_type()) +
                                             "); register its integers");
  }
  if (!StagedTensors::usable(tensor)) {
    throw Error(ErrorKind::kInvalid,
                "tensor_register: the tensor is not contiguous, or is a conjugate or negative "
                "view; " +
                    remedy);
  }
  if (tensor.dim() > static_cast<int64_t>(kMostWindowDimensions)) {
    throw Error(ErrorKind::kUnsupported,
                "tensor_register: the tensor has " + std::to_string(tensor.dim()) +
                    " dimensions, and a window at most " + std::to_string(kMostWindowDimensions) +
                    "; register a view with fewer");
  }
  auto window = communicator_->make_window(tensor.mutable_data_ptr(), tensor.nbytes());
  if (window) return window;
  throw Error(ErrorKind::kInvalid,
              "tensor_register: the tensor is not in the segment of " + group_->name_ +
                  ", so other ranks cannot write to it; " + remedy +
                  ", or start the job with HBMCOMM_ALLOCATOR=segment, which places tensors of 64 "
                  "KiB and more in the segment of HBMCOMM_MEMORY");
}

// Announces `own` to all ranks, with the text of `refusal` if it is not null. Returns the
// announcements of the ranks, by rank.
std::vector<WindowHbm::Announcement> WindowHbm::announce(Announcement own,
                                                         const std::exception_ptr& refusal) const {
  static_assert(std::is_trivially_copyable_v<Announcement>);
  if (refusal) {
    std::string why;
    try {
      std::rethrow_exception(refusal);
    } catch (const std::exception& error) {
      why = error.what();
    } catch (...) {
    }
    if (why.empty()) why = "an error without a text";
    why.copy(own.refusal.data(), own.refusal.size() - 1);
  }
  const auto bytes = static_cast<int64_t>(sizeof(Announcement));
  const at::TensorOptions plain(at::kByte);
  at::Tensor input = at::empty({bytes}, plain);
  at::Tensor output = at::empty({bytes * group_->getSize()}, plain);
  std::memcpy(input.mutable_data_ptr(), &own, sizeof(Announcement));
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  group_->_allgather_base(output, input, options)->wait();
  std::vector<Announcement> all(static_cast<size_t>(group_->getSize()));
  std::memcpy(all.data(), output.const_data_ptr(), all.size() * sizeof(Announcement));
  return all;
}

// Throws the same mismatch on all ranks if their calls differ. Throws if a rank refuses: this
// rank's own refusal first.
void WindowHbm::require_agreement(const char* operation, const std::vector<Announcement>& all,
                                  const std::exception_ptr& refusal) const {
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].describe() == all[0].describe()) continue;
    throw Error(ErrorKind::kMismatch,
                "ranks disagree about a window of " + group_->name_ + ": rank " +
                    group_->connection_.peers->list({0}) + " called " + all[0].describe() +
                    ", and rank " + group_->connection_.peers->list({static_cast<int>(rank)}) +
                    " called " + all[rank].describe() +
                    " (windows are numbered as the group made them); neither call had an effect: "
                    "make windows, and register and deregister their tensors, in one order on all "
                    "ranks");
  }
  if (refusal) std::rethrow_exception(refusal);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto& text = all[rank].refusal;
    const std::string why(text.data(), strnlen(text.data(), text.size()));
    if (why.empty()) continue;
    const std::vector<int> refusing{static_cast<int>(rank)};
    throw Error(ErrorKind::kInvalid, std::string(operation) + " of a window of " + group_->name_ +
                                         " was refused by rank " +
                                         group_->connection_.peers->list(refusing) + ": " + why);
  }
}

void WindowHbm::tensor_register(const at::Tensor& tensor, bool owning) {
  translated([&] {
    const auto use = group_->enter();
    require_group("tensor_register");
    require_no_batch("tensor_register");
    const Change change(*this, "tensor_register");
    {
      const std::lock_guard lock(mutex_);
      if (registration_) {
        throw Error(ErrorKind::kInvalid,
                    "tensor_register: double registration: the window has a tensor; call "
                    "tensor_deregister() on all ranks first, or make another window");
      }
    }
    auto made = std::make_shared<Registration>();
    Announcement own{.call = Announcement::Call::kRegister, .window = number_};
    std::exception_ptr refusal;
    try {
      made->window = make_part(tensor);
      if (owning) made->tensor = tensor.detach();
      own.part = made->window->part();
      own.type = static_cast<int64_t>(tensor.scalar_type());
      own.dimensions = tensor.dim();
      std::copy_n(tensor.sizes().data(), tensor.dim(), own.sizes.begin());
    } catch (const std::exception&) {
      refusal = std::current_exception();
    }
    // After an error of `step` on this rank, other ranks may have registered the window.
    const auto exposed = [&](const auto& step) {
      try {
        return step();
      } catch (...) {
        if (made->tensor.defined()) {
          keep_written_tensor(group_->name_ + ": tensor_register failed on this rank",
                              made->tensor);
        }
        throw;
      }
    };
    const std::vector<Announcement> all = exposed([&] { return announce(own, refusal); });
    try {
      require_agreement("tensor_register", all, refusal);
    } catch (...) {  // no rank uses the window
      if (made->window) made->window->close();
      throw;
    }
    exposed([&] { connect(all, *made); });
    RegistrationPtr exchanged = std::move(made);
    const std::lock_guard lock(mutex_);
    registration_.swap(exchanged);
  });
}

// Takes the places of all ranks' tensors.
void WindowHbm::connect(const std::vector<Announcement>& all, Registration& made) {
  std::vector<WindowPart> parts;
  for (const Announcement& each : all) {
    const std::vector<int64_t> sizes(each.sizes.begin(), each.sizes.begin() + each.dimensions);
    parts.push_back(each.part);
    made.places.push_back(
        {static_cast<at::ScalarType>(each.type), sizes, c10::multiply_integers(sizes)});
  }
  made.window->connect(parts);
}

// Waits until all puts and signals of this rank have ended, and closes the window to others.
// Returns the error; null: none.
std::exception_ptr WindowHbm::drain(SharedWindow& window) const {
  progress::OperationQueue& queue = *group_->p2p_queue_;
  try {
    const auto request =
        queue.enqueue(window.drain(), group_->timeout_or_default(c10d::kUnsetTimeout), {});
    queue.launch(request, progress::Mode::kAsync);  // Ctrl-C ends the wait alone
    queue.wait(request, progress::Clock::time_point::max());
    return request->error();
  } catch (...) {
    return std::current_exception();
  }
}

void WindowHbm::tensor_deregister() {
  translated([&] {
    const auto use = group_->enter();
    require_no_batch("tensor_deregister");
    const Change change(*this, "tensor_deregister");
    const RegistrationPtr registration = registered("tensor_deregister");
    SharedWindow& window = *registration->window;
    try {
      // The other ranks wait for this one, so they must learn of every error.
      std::exception_ptr refusal = drain(window);
      if (const size_t waits = window.waits(); !refusal && waits > 0) {
        refusal = std::make_exception_ptr(Error(
            ErrorKind::kInvalid, "tensor_deregister: rank " + std::to_string(group_->getRank()) +
                                     " still has " + std::to_string(waits) +
                                     " wait_signal() that has not ended; signal it first"));
      }
      const Announcement own{.call = Announcement::Call::kDeregister, .window = number_};
      require_agreement("tensor_deregister", announce(own, refusal), refusal);
    } catch (...) {
      window.reopen();
      throw;
    }
    window.close();
    const std::lock_guard lock(mutex_);
    registration_.reset();  // `registration` still has the tensor
  });
}

void WindowHbm::check_put(const at::Tensor& tensor, int to, int64_t offset,
                          const Registration& registration) const {
  check_tensor(tensor, "put: the argument");
  if (!tensor.is_cpu()) {
    throw Error(ErrorKind::kUnsupported, "put: the tensor is on " + tensor.device().str() +
                                             ", and hbm puts tensors of the CPU; put a copy "
                                             "(tensor.cpu())");
  }
  const Place& place = registration.places[static_cast<size_t>(to)];
  if (tensor.scalar_type() != place.type) {
    throw Error(ErrorKind::kInvalid, std::string("put: the tensor is of type ") +
                                         c10::toString(tensor.scalar_type()) +
                                         ", and the window of rank " + std::to_string(to) +
                                         " of type " + c10::toString(place.type));
  }
  if (offset < 0 || offset > place.count || tensor.numel() > place.count - offset) {
    throw Error(ErrorKind::kInvalid, "put: the tensor of " + std::to_string(tensor.numel()) +
                                         " elements at offset " + std::to_string(offset) +
                                         " exceeds the window size of rank " + std::to_string(to) +
                                         ", which is " + std::to_string(place.count));
  }
  const std::byte* const target =
      registration.window->data(to) + static_cast<size_t>(offset) * tensor.itemsize();
  if (StagedTensors::usable(tensor) &&
      share_bytes(tensor.const_data_ptr(), target, tensor.nbytes())) {
    throw Error(ErrorKind::kInvalid,
                "put: the tensor shares memory with its target in the window of rank " +
                    std::to_string(to) + "; put a copy (tensor.clone())");
  }
}

c10::intrusive_ptr<c10d::Work> WindowHbm::put(const at::Tensor& tensor, int64_t to, int64_t offset,
                                              bool async, const PutOptions& opts) {
  return ended_unless(async, group_->guarded([&] {
    const RegistrationPtr registration = registered("put");
    if (!async) require_no_batch("put");
    const int target = group_->check_root(to, "put");
    check_put(tensor, target, offset, *registration);
    StagedTensors staged;
    const Source in = staged.input(tensor);
    const Dtype dtype = to_dtype(tensor.scalar_type());
    const size_t first = static_cast<size_t>(offset) * element_size(dtype);
    return group_->run_p2p({&operations::kPut, {tensor}, {}, opts.timeout, true, {}, target},
                           std::move(staged), [&](const std::shared_ptr<int>&) {
                             return registration->window->put(in, dtype, target, first);
                           });
  }));
}

c10::intrusive_ptr<c10d::Work> WindowHbm::signal(int64_t to, bool async,
                                                 const SignalOptions& opts) {
  return signal_on(to, 0, async, opts.timeout);
}

c10::intrusive_ptr<c10d::Work> WindowHbm::wait_signal(int64_t from, bool async,
                                                      const WaitSignalOptions& opts) {
  return wait_signal_on(from, 0, async, opts.timeout);
}

c10::intrusive_ptr<c10d::Work> WindowHbm::signal_on(int64_t to, int channel, bool async,
                                                    std::chrono::milliseconds timeout) {
  return ended_unless(async, group_->guarded([&] {
    const RegistrationPtr registration = registered("signal");
    if (!async) require_no_batch("signal");
    const int target = group_->check_root(to, "signal");
    check_channel(channel, "signal");
    return group_->run_p2p(
        {&operations::kSignal, {}, {}, timeout, true, {}, target}, StagedTensors(),
        [&](const std::shared_ptr<int>&) { return registration->window->signal(target, channel); });
  }));
}

c10::intrusive_ptr<c10d::Work> WindowHbm::wait_signal_on(int64_t from, int channel, bool async,
                                                         std::chrono::milliseconds timeout) {
  return ended_unless(async, group_->guarded([&] {
    const RegistrationPtr registration = registered("wait_signal");
    if (!async) require_no_batch("wait_signal");
    const int source = group_->check_root(from, "wait_signal");
    check_channel(channel, "wait_signal");
    return group_->run_p2p({&operations::kWaitSignal, {}, {}, timeout, true, {}, source},
                           StagedTensors(), [&](const std::shared_ptr<int>&) {
                             return registration->window->wait_signal(source, channel);
                           });
  }));
}

at::Tensor WindowHbm::map_remote_tensor(int64_t rank) {
  return translated([&] {
    const auto use = group_->enter();
    const RegistrationPtr registration = registered("map_remote_tensor");
    const int owner = group_->check_root(rank, "map_remote_tensor");
    if (owner == group_->getRank() && registration->tensor.defined()) {
      return registration->tensor.detach();  // the caller may give its tensor other memory
    }
    const Place& place = registration->places[static_cast<size_t>(owner)];
    return at::from_blob(
        registration->window->data(owner), place.sizes,
        [window = registration->window](void* /*data*/) {}, at::TensorOptions(place.type));
  });
}

WindowAttr WindowHbm::get_attr(int64_t rank) {
  return translated([&] {
    const auto use = group_->enter();
    registered("get_attr");
    group_->check_root(rank, "get_attr");
    return WindowAttr();
  });
}

bool WindowHbm::current() const {
  const auto use = group_->enter();
  return group_->connection_.communicator == communicator_;
}

std::shared_ptr<SharedWindow> WindowHbm::shared() const { return registered("shared")->window; }

}  // namespace hbm::process_group
