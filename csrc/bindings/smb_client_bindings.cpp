#include "bindings/smb_module.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "bindings/smb_buffer_bindings.h"
#include "bindings/smb_stats_bindings.h"
#include "box/client/tuning.h"
#include "kernels/accumulate.h"
#include "smb_client.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

using box::client::Client;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// Converts seconds to milliseconds, at most kLongestTimeout. `name` is the argument's name in
// errors.
std::chrono::milliseconds milliseconds(const char* name, double seconds) {
  if (!(seconds >= 0)) {
    throw Error(ErrorKind::kInvalid, std::string(name) +
                                         " is a number of seconds and not negative, not " +
                                         std::to_string(seconds));
  }
  constexpr std::chrono::duration<double> kLongest = box::client::kLongestTimeout;
  return std::chrono::ceil<std::chrono::milliseconds>(
      std::min(std::chrono::duration<double>(seconds), kLongest));
}

// Runs the handlers of signals; their exception ends the wait.
void look_for_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::shared_ptr<Client> connect(const std::string& url, const std::string& token,
                                const std::string& transport, uint32_t lanes, bool seal,
                                bool read_only, double connect_timeout, double reconnect_timeout,
                                std::optional<double> timeout) {
  const box::client::ClientOptions options{
      .url = url,
      .token = token,
      .transport = box::client::parse_transport(transport),
      .lanes = lanes,
      .seal = seal,
      .read_only = read_only,
      .connect_timeout = milliseconds("connect_timeout", connect_timeout),
      .reconnect_timeout = milliseconds("reconnect_timeout", reconnect_timeout),
      .timeout = milliseconds("timeout", timeout.value_or(0)),
      .while_waiting = &look_for_signals,
  };
  const py::gil_scoped_release unlocked;
  return {new Client(options), [](Client* last) {
            const py::gil_scoped_release unlocked;
            delete last;
          }};
}

box::protocol::AllocMode parse_mode(const std::string& mode) {
  if (mode == "auto") return box::protocol::AllocMode::kAuto;
  if (mode == "create") return box::protocol::AllocMode::kCreate;
  if (mode == "attach") return box::protocol::AllocMode::kAttach;
  throw Error(ErrorKind::kInvalid, "mode must be auto, create or attach, not \"" + mode + '"');
}

Dtype parse_dtype(const std::string& name) {
  for (size_t i = 0; i < kDtypeCount; ++i) {
    if (name == dtype_name(static_cast<Dtype>(i))) return static_cast<Dtype>(i);
  }
  throw Error(ErrorKind::kInvalid, "\"" + name +
                                       "\" is no element type of a box: float32, float64, float16, "
                                       "bfloat16, int32 and int64 are");
}

box::client::Segment alloc(Client& client, uint64_t size, std::optional<KeyHalves> key,
                           const std::string& mode, bool temporary, bool read_only) {
  const box::client::AllocOptions options{
      .size = size,
      .key = key ? box::protocol::Id{key->first, key->second} : box::protocol::Id{},
      .mode = parse_mode(mode),
      .temporary = temporary,
      .read_only = read_only,
  };
  const py::gil_scoped_release unlocked;
  return client.alloc(options);
}

// The future of an operation. Its result is the value of a fetch_add, and None for other
// operations.
struct PythonFuture {
  box::client::Future future;
  bool has_value = false;

  void wait(std::optional<double> timeout) const {
    bool done = false;
    {
      const py::gil_scoped_release unlocked;
      const auto most = timeout ? std::chrono::nanoseconds(milliseconds("timeout", *timeout))
                                : std::chrono::nanoseconds::max();
      done = future.wait(most);
    }
    if (done) return;
    PyErr_Format(PyExc_TimeoutError, "the operation is not done within %s s",
                 std::to_string(*timeout).c_str());
    throw py::error_already_set();
  }

  py::object result(std::optional<double> timeout) const {
    wait(timeout);
    const int64_t value = future.get();
    return has_value ? py::object(py::int_(value)) : py::none();
  }
};

// Waits for all futures, and throws the error of the first one that failed.
void wait_all(const std::vector<PythonFuture>& futures) {
  std::exception_ptr first;
  for (const PythonFuture& each : futures) {
    try {
      each.future.get();
    } catch (const py::error_already_set&) {  // the handler of a signal ends the wait
      throw;
    } catch (const std::exception&) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

// Returns the first `size` bytes of an object's memory; all its memory if there is no `size`.
PythonMemory part(const py::object& object, std::optional<uint64_t> size, bool writable) {
  PythonMemory memory = memory_of(object, writable);
  if (!size) return memory;
  if (*size > memory.bytes) {
    throw Error(ErrorKind::kInvalid, "the buffer has " + std::to_string(memory.bytes) +
                                         " bytes, fewer than the " + std::to_string(*size) +
                                         " asked for");
  }
  memory.bytes = *size;
  return memory;
}

// Memory registered with the client while this object exists.
struct RegisteredBuffer {
  PythonMemory memory;
  std::shared_ptr<void> registration;  // destroyed before `memory`
};

RegisteredBuffer register_memory(Client& client, const py::object& object) {
  PythonMemory memory = memory_of(object, /*writable=*/true);
  std::shared_ptr<void> registration = client.register_memory(memory.data, memory.bytes);
  return {std::move(memory), std::move(registration)};
}

void read(Client& client, const box::client::Segment& segment, uint64_t offset,
          std::optional<uint64_t> size, const py::object& into) {
  PythonMemory memory = part(into, size, true);
  const py::gil_scoped_release unlocked;
  client.read(segment, offset, memory.data, memory.bytes, memory.hold);
}

void write(Client& client, const box::client::Segment& segment, uint64_t offset,
           std::optional<uint64_t> size, const py::object& source) {
  PythonMemory memory = part(source, size, false);
  const py::gil_scoped_release unlocked;
  client.write(segment, offset, memory.data, memory.bytes, memory.hold);
}

PythonFuture batch_read(box::client::Batch& batch, const box::client::Segment& segment,
                        uint64_t offset, std::optional<uint64_t> size, const py::object& into) {
  const PythonMemory memory = part(into, size, true);
  return {batch.read(segment, offset, memory.data, memory.bytes, memory.hold)};
}

PythonFuture batch_write(box::client::Batch& batch, const box::client::Segment& segment,
                         uint64_t offset, std::optional<uint64_t> size, const py::object& source) {
  const PythonMemory memory = part(source, size, false);
  return {batch.write(segment, offset, memory.data, memory.bytes, memory.hold)};
}

PythonFuture batch_accumulate(box::client::Batch& batch, const box::client::Segment& target,
                              const box::client::Segment& source, const std::string& dtype,
                              const std::string& source_dtype, bool assign, double scale,
                              uint64_t bytes, uint64_t target_offset,
                              std::optional<uint64_t> source_offset) {
  const kernels::Formula types{.target = parse_dtype(dtype), .source = parse_dtype(source_dtype)};
  const uint64_t same_element = types.source_bytes(target_offset);
  return {batch.accumulate(target, source,
                           {.dtype = types.target,
                            .source_dtype = types.source,
                            .combine = assign ? Combine::kAssign : Combine::kAdd,
                            .scale = scale,
                            .bytes = bytes,
                            .target_offset = target_offset,
                            .source_offset = source_offset.value_or(same_element)})};
}

// The memory of a segment, kept alive by its memoryviews.
struct View {
  std::shared_ptr<std::byte> memory;
  py::ssize_t bytes;
  bool read_only;
};

void register_segment(py::module_& m) {
  py::class_<View>(m, "View", py::buffer_protocol()).def_buffer([](const View& view) {
    return py::buffer_info(view.memory.get(), 1, py::format_descriptor<uint8_t>::format(), 1,
                           {view.bytes}, {1}, view.read_only);
  });
  py::class_<box::client::Segment>(m, "Segment")
      .def_property_readonly(
          "key", [](const box::client::Segment& segment) { return halves(segment.key()); })
      .def_property_readonly("size", &box::client::Segment::size)
      .def_property_readonly("created", &box::client::Segment::created)
      .def_property_readonly("read_only", &box::client::Segment::read_only)
      .def("view", [](const box::client::Segment& segment) {
        return View{segment.memory(), static_cast<py::ssize_t>(segment.size()),
                    segment.read_only()};
      });
}

void register_batch(py::module_& m) {
  py::class_<PythonFuture>(m, "Future")
      .def("done", [](const PythonFuture& future) { return future.future.done(); })
      .def("wait", &PythonFuture::wait, py::arg("timeout"))
      .def("result", &PythonFuture::result, py::arg("timeout") = py::none());
  m.def("wait_all", &wait_all, py::arg("futures"), Unlocked());
  py::class_<box::client::Batch>(m, "Batch")
      .def("read", &batch_read, py::arg("segment"), py::arg("offset"), py::arg("size"),
           py::arg("into"))
      .def("write", &batch_write, py::arg("segment"), py::arg("offset"), py::arg("size"),
           py::arg("source"))
      .def("accumulate", &batch_accumulate, py::arg("target"), py::arg("source"), py::arg("dtype"),
           py::arg("source_dtype"), py::arg("assign"), py::arg("scale"), py::arg("size"),
           py::arg("offset"), py::arg("source_offset"))
      .def(
          "fetch_add",
          [](box::client::Batch& batch, const box::client::Segment& segment, uint64_t offset,
             int64_t n) { return PythonFuture{batch.fetch_add(segment, offset, n), true}; },
          py::arg("segment"), py::arg("offset"), py::arg("n"))
      .def("issue", &box::client::Batch::issue, Unlocked())
      .def("issue_and_wait_next", &box::client::Batch::issue_and_wait_next, Unlocked());
}

void register_client(py::module_& m) {
  // NOLINTNEXTLINE(bugprone-unused-raii): the constructor registers the class
  py::class_<RegisteredBuffer>(m, "RegisteredBuffer");
  py::class_<Client, std::shared_ptr<Client>>(m, "Client")
      .def(py::init(&connect), py::arg("url"), py::arg("token"), py::arg("transport"),
           py::arg("lanes"), py::arg("seal"), py::arg("read_only"), py::arg("connect_timeout"),
           py::arg("reconnect_timeout"), py::arg("timeout"))
      .def_property_readonly(
          "transport",
          [](const Client& client) { return box::client::transport_name(client.transport()); })
      .def_property_readonly("why_transport", &Client::why_transport)
      .def_property_readonly("closed", &Client::closed)
      .def("alloc", &alloc, py::arg("size"), py::arg("key"), py::arg("mode"), py::arg("temporary"),
           py::arg("read_only"))
      .def(
          "exists",
          [](Client& client, const KeyHalves& key) {
            return client.exists({key.first, key.second});
          },
          py::arg("key"), Unlocked())
      .def("read", &read, py::arg("segment"), py::arg("offset"), py::arg("size"), py::arg("into"))
      .def("write", &write, py::arg("segment"), py::arg("offset"), py::arg("size"),
           py::arg("source"))
      .def("free", &Client::free, py::arg("segment"), Unlocked())
      .def("remove", &Client::remove, py::arg("segment"), Unlocked())
      .def("register_memory", &register_memory)
      .def("batch", &Client::batch)
      .def("ping", &Client::ping, Unlocked())
      .def("stats",
           [](Client& client) {
             box::client::Stats stats;
             {
               const py::gil_scoped_release unlocked;
               stats = client.stats();
             }
             return stats_dict(stats);
           })
      .def(
          "close",
          [](Client& client, double patience) { client.close(milliseconds("patience", patience)); },
          py::arg("patience"), Unlocked());
}

}  // namespace

void register_smb_client(py::module_& m) {
  register_segment(m);
  register_batch(m);
  register_client(m);
}

}  // namespace hbm::bindings
