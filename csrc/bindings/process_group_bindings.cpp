#include <ATen/DeviceAccelerator.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <system_error>

#include "base/error.h"
#include "bindings/module.h"
#include "bootstrap/claim.h"
#include "bootstrap/early_failure.h"
#include "communicator/mpi/library.h"
#include "communicator/mpi/trial.h"
#include "pg_hbm.h"
#include "process_group/python_lock.h"
#include "process_group/store_connection.h"
#include "process_group/symmetric_memory.h"
#include "process_group/types.h"

namespace py = pybind11;

namespace hbm::bindings {

using process_group::GroupOptions;
using process_group::GroupResource;
using process_group::NextGroup;
using process_group::ProcessGroupHbm;
using process_group::Reconfiguration;
using process_group::translated;

// Python's reference to an object of c10d. Releases the GIL while it destroys the object, as c10d's
// own bindings do. The destructor of a group waits for the group's threads, and these threads may
// need the GIL to drop a tensor or to run a callback. This holder and c10d's own holder both have
// the layout of intrusive_ptr, because pybind11 may read a holder of one type as a holder of the
// other.
template <typename T>
class UnlockedHolder {
 public:
  UnlockedHolder() = default;
  explicit UnlockedHolder(T* owned) : held_(c10::intrusive_ptr<T>::unsafe_steal_from_new(owned)) {}
  // NOLINTNEXTLINE(google-explicit-constructor): pybind11 needs this conversion
  UnlockedHolder(c10::intrusive_ptr<T> held) : held_(std::move(held)) {}
  UnlockedHolder(const UnlockedHolder&) = default;
  UnlockedHolder(UnlockedHolder&&) noexcept = default;
  UnlockedHolder& operator=(const UnlockedHolder&) = default;
  UnlockedHolder& operator=(UnlockedHolder&&) noexcept = default;
  ~UnlockedHolder() {
    if (held_ && PyGILState_Check() != 0) {
      const py::gil_scoped_release unlocked;
      held_.reset();
    }
  }

  T* get() const noexcept { return held_.get(); }
  T& operator*() const noexcept { return *held_; }
  T* operator->() const noexcept { return held_.get(); }

 private:
  c10::intrusive_ptr<T> held_;
};

}  // namespace hbm::bindings

PYBIND11_DECLARE_HOLDER_TYPE(T, hbm::bindings::UnlockedHolder<T>, true);

namespace hbm::bindings {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

void require_rank(int rank, int size, const std::vector<uint64_t>& members,
                  const std::string& group) {
  if (size < 1) {
    throw Error(ErrorKind::kInvalid, group + " cannot have " + std::to_string(size) +
                                         " ranks: the world size is 1 or more");
  }
  if (rank < 0 || rank >= size) {
    throw Error(ErrorKind::kInvalid, "rank " + std::to_string(rank) + " is not in " + group +
                                         " of " + std::to_string(size) +
                                         " ranks: it must be 0 to " + std::to_string(size - 1));
  }
  const std::set<uint64_t> different(members.begin(), members.end());
  if (members.size() != static_cast<size_t>(size) || different.size() != members.size()) {
    throw Error(ErrorKind::kInvalid,
                group + " of " + std::to_string(size) + " ranks names the members " +
                    bootstrap::list_members(members) + ": each rank must be named once");
  }
}

c10::intrusive_ptr<c10d::Backend> create(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int size, std::chrono::milliseconds timeout,
                                         const c10::intrusive_ptr<GroupOptions>& options,
                                         const std::string& name,
                                         const std::vector<uint64_t>& global_ranks,
                                         const std::string& backend, bool enable_reconfigure) {
  const std::string group = "group \"" + name + "\"";
  std::vector<uint64_t> members = global_ranks;
  if (global_ranks.empty()) {  // the default group
    members.resize(static_cast<size_t>(std::max(size, 0)));
    std::iota(members.begin(), members.end(), 0);
  }
  // If this rank fails before its rendezvous, reports the error to the other ranks.
  const auto report = [&](const std::exception& error) {
    if (members.empty()) return;
    const auto* const torch = dynamic_cast<const c10::Error*>(&error);
    bootstrap::fail_early(process_group::connect_directly(store), rank, members, group,
                          torch != nullptr ? torch->what_without_backtrace() : error.what());
  };
  c10::intrusive_ptr<GroupOptions> own;
  try {
    translated([&] { require_rank(rank, size, members, group); });
    own = options ? options : translated([] { return GroupOptions::from_environment(); });
  } catch (const std::exception& error) {
    report(error);
    throw;
  }
  own = c10::make_intrusive<GroupOptions>(*own, backend);
  own->timeout = timeout;
  own->group_name = name;
  own->global_ranks_in_group = members;
  own->enable_reconfigure = enable_reconfigure;
  try {
    return c10::make_intrusive<ProcessGroupHbm>(store, rank, size, own, name);
  } catch (const std::system_error& error) {  // no thread could be started
    report(error);
    translated([&] { throw Error(ErrorKind::kUnavailable, group + ": " + error.what()); });
    throw;
  }
}

// A group's resource that is a Python object. Once the interpreter is finalised, the object is
// neither closed nor released.
class PythonGroupResource final : public GroupResource {
 public:
  explicit PythonGroupResource(py::object self) : self_(std::move(self)) {}
  // NOLINTNEXTLINE(bugprone-exception-escape): the lock is available unless Python is broken
  ~PythonGroupResource() override {
    if (Py_IsInitialized() != 0) {
      const py::gil_scoped_acquire locked;
      self_ = py::object();
    } else {
      self_.release();
    }
  }

  void close(bool patient) override {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire locked;
    self_.attr("close")(py::arg("patient") = patient);
  }

  const py::object& self() const noexcept { return self_; }

 private:
  py::object self_;
};

void attach(ProcessGroupHbm& group, py::object resource) {
  const auto attached = std::make_shared<PythonGroupResource>(std::move(resource));
  const py::gil_scoped_release unlocked;
  group.attach(attached);
}

py::object resource(const ProcessGroupHbm& group) {
  const auto attached = std::static_pointer_cast<PythonGroupResource>(group.resource());
  return attached ? attached->self() : py::none();
}

// Returns the texts of all ranks. If `own_text` raises an exception, this rank raises the same
// exception, and the other ranks raise an error with its text.
std::vector<std::string> gather_texts(ProcessGroupHbm& group, const std::string& step,
                                      const py::function& own_text) {
  std::exception_ptr raised;
  try {
    const py::gil_scoped_release unlocked;
    return group.gather_texts(step, [&] {
      const py::gil_scoped_acquire locked;
      try {
        return own_text().cast<std::string>();
      } catch (py::error_already_set& error) {
        raised = std::current_exception();
        throw Error(ErrorKind::kUnavailable,
                    py::str("{}: {}").format(error.type().attr("__name__"), error.value()));
      }
    });
  } catch (const std::exception&) {
    if (raised) std::rethrow_exception(raised);
    throw;
  }
}

NextGroup meet(Reconfiguration& reconfiguration, const std::vector<std::string>& handles,
               bool ordered, int64_t uuid, std::chrono::milliseconds timeout) {
  return translated([&] {
    return reconfiguration.meet(handles, ordered, uuid, "the default group",
                                std::chrono::steady_clock::now() + timeout);
  });
}

// Registers a Python function. The thread that calls or drops it may not hold the GIL.
void register_abort_hook(ProcessGroupHbm& group, int64_t id, py::function hook) {
  const std::shared_ptr<py::function> held(new py::function(std::move(hook)),
                                           [](py::function* owned) {
                                             const py::gil_scoped_acquire locked;
                                             delete owned;
                                           });
  const py::gil_scoped_release unlocked;
  translated([&] {
    group.registerAbortHook(id, [held] {
      const py::gil_scoped_acquire locked;
      try {
        (*held)();
      } catch (const py::error_already_set& error) {
        // The exception belongs to Python and is dropped here, where this thread holds the GIL.
        throw Error(ErrorKind::kUnavailable, error.what());
      }
    });
  });
}

// Calls `call` without Python's lock (process_group/python_lock.h).
void call_unlocked(const std::function<void()>& call) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return call();
  const py::gil_scoped_release unlocked;
  call();
}

py::dict build_info() {
  using namespace py::literals;
  return py::dict("version"_a = HBM_VERSION, "torch_version"_a = HBM_TORCH_VERSION);
}

}  // namespace

void register_process_group(py::module_& m) {
  py::module_::import("torch._C._distributed_c10d");  // the base classes
  process_group::set_unlocked_call(&call_unlocked);
  process_group::register_symmetric_memory();

  py::class_<GroupOptions, c10d::Backend::Options, c10::intrusive_ptr<GroupOptions>>(m, "Options")
      .def(py::init([](std::optional<std::string> memory,
                       const std::optional<std::string>& transport,
                       std::optional<int64_t> staging_bytes, std::optional<int64_t> reduce_threads,
                       const std::optional<std::string>& parameter_server,
                       std::optional<double> heartbeat_timeout) {
             const auto defaults = GroupOptions::from_environment();
             auto heartbeat = defaults->heartbeat_timeout;
             if (heartbeat_timeout) {
               heartbeat = std::chrono::milliseconds(
                   static_cast<int64_t>(std::clamp(*heartbeat_timeout, 0.0, 1e9) * 1000));
             }
             if (memory) memory::named_by_user(memory::parse_policy(*memory));
             return c10::make_intrusive<GroupOptions>(
                 memory.value_or(memory::policy_name(defaults->policy)),
                 transport ? bootstrap::parse_transport(*transport, "transport")
                           : defaults->transport,
                 staging_bytes.value_or(defaults->staging_bytes),
                 reduce_threads.value_or(defaults->reduce_threads),
                 parameter_server.value_or(defaults->parameter_server), heartbeat);
           }),
           py::kw_only(), py::arg("memory") = py::none(), py::arg("transport") = py::none(),
           py::arg("staging_bytes") = py::none(), py::arg("reduce_threads") = py::none(),
           py::arg("parameter_server") = py::none(), py::arg("heartbeat_timeout") = py::none())
      .def_property_readonly(
          "memory", [](const GroupOptions& self) { return memory::policy_name(self.policy); })
      .def_property_readonly(
          "transport",
          [](const GroupOptions& self) { return bootstrap::transport_name(self.transport); })
      .def_readonly("staging_bytes", &GroupOptions::staging_bytes)
      .def_readonly("reduce_threads", &GroupOptions::reduce_threads)
      .def_readonly("parameter_server", &GroupOptions::parameter_server)
      .def_property_readonly("heartbeat_timeout", [](const GroupOptions& self) {
        return self.heartbeat_timeout
                   ? std::optional<double>(
                         std::chrono::duration<double>(*self.heartbeat_timeout).count())
                   : std::nullopt;
      });

  py::class_<ProcessGroupHbm, c10d::Backend, UnlockedHolder<ProcessGroupHbm>> group(
      m, "ProcessGroupHbm");
  group
      .def(
          "allocate_tensor",
          [](ProcessGroupHbm& self, int64_t size, at::ScalarType dtype, const at::Device& device) {
            if (at::isAccelerator(device.type())) {
              return self.allocateTensor(size, at::TensorOptions().dtype(dtype).device(device));
            }
            if (!device.is_cpu()) {
              throw Error(ErrorKind::kInvalid,
                          "allocate_tensor: hbm has no memory on " + device.str());
            }
            return self.allocate(size, dtype);
          },
          py::arg("size"), py::kw_only(), py::arg("dtype"), py::arg("device"), Unlocked())
      .def("drop_batch", &ProcessGroupHbm::drop_batch, Unlocked())
      .def("gather_texts", &gather_texts, py::arg("step"), py::arg("tell"))
      .def("networks", &ProcessGroupHbm::networks)
      .def("attach", &attach, py::arg("resource"))
      .def_property_readonly("resource", &resource);
  // In newer releases of PyTorch, c10d.Backend has these properties itself.
  if (!py::hasattr(group, "options")) {
    group.def_property_readonly("options", [](ProcessGroupHbm& self) {
      return c10::dynamic_intrusive_pointer_cast<GroupOptions>(self.getBackendOptions());
    });
  }
  if (!py::hasattr(group, "get_error")) {
    group.def("get_error", &ProcessGroupHbm::getError, Unlocked());
  }
  if (!py::hasattr(group, "register_abort_hook")) {
    group.def("register_abort_hook", &register_abort_hook, py::arg("hook_id"), py::arg("hook"))
        .def("unregister_abort_hook", &ProcessGroupHbm::unregisterAbortHook, py::arg("hook_id"),
             Unlocked());
  }
  if (!py::hasattr(group, "memory_stats")) {
    group.def("memory_stats", &ProcessGroupHbm::getMemoryStats, Unlocked());
  }

  m.def("create", &create, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
        py::arg("options"), py::arg("name"), py::arg("global_ranks"), py::arg("backend"),
        py::arg("enable_reconfigure"), Unlocked());

  py::class_<Reconfiguration>(m, "Reconfiguration")
      .def(py::init<>())
      .def(
          "handle", [](Reconfiguration& self) { return translated([&] { return self.handle(); }); },
          Unlocked())
      .def("meet", &meet, py::arg("handles"), py::arg("ordered"), py::arg("uuid"),
           py::arg("timeout"), Unlocked())
      .def(
          "conclude",
          [](Reconfiguration& self, const NextGroup& next) {
            translated([&] { self.conclude(next); });
          },
          py::arg("next"), Unlocked());
  py::class_<NextGroup>(m, "NextGroup")
      .def_property_readonly("store", [](const NextGroup& self) { return self.store; })
      .def_property_readonly("rank", &NextGroup::rank)
      .def_property_readonly("size", &NextGroup::size)
      .def(
          "fail", [](const NextGroup& self, const std::string& why) { self.meeting->fail(why); },
          py::arg("why"), Unlocked());

  m.def("set_mpi_search_path", &communicator::mpi::set_search_path, py::arg("directories"));
  m.def("set_mpi_trial_program", &communicator::mpi::set_trial_program, py::arg("program"));
  m.def("build_info", &build_info);
}

}  // namespace hbm::bindings
