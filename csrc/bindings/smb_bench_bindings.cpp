#include "bindings/smb_bench_bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bindings/smb_bench_client.h"
#include "bindings/smb_bench_sockets.h"
#include "bindings/smb_bench_triad.h"

namespace py = pybind11;

namespace hbm {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

// Of a contiguous buffer, which the caller keeps.
std::span<std::byte> bytes_of(const py::buffer& buffer, bool writable = true) {
  const py::buffer_info info = buffer.request(writable);
  return {static_cast<std::byte*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

std::unique_ptr<ClientLoop> connected(const std::string& url, const std::string& token,
                                      const std::string& transport, uint32_t lanes,
                                      const py::buffer& local) {
  client::ClientOptions options;
  options.url = url;
  options.token = token;
  options.transport = client::parse_transport(transport);
  options.lanes = lanes;
  const std::span<std::byte> bytes = bytes_of(local);
  const py::gil_scoped_release unlocked;
  return std::make_unique<ClientLoop>(options, bytes);
}

void register_bench_client(py::module_& m) {
  py::class_<ClientLoop>(m, "BenchClient")
      .def(py::init(&connected), py::arg("url"), py::arg("token"), py::arg("transport"),
           py::arg("lanes"), py::arg("local"), py::keep_alive<1, 6>())
      .def_property_readonly("transport", &ClientLoop::transport)
      .def("run", &ClientLoop::run, py::arg("action"), py::arg("calls"), Unlocked())
      .def("times", &ClientLoop::times, py::arg("action"), py::arg("calls"), Unlocked())
      .def("mixed", &ClientLoop::mixed, py::arg("begin"), py::arg("end"), py::arg("piece"),
           Unlocked());
}

void register_triad(py::module_& m) {
  py::class_<Triad>(m, "BenchTriad")
      .def(py::init(
               [](const py::buffer& a, const py::buffer& b, const py::buffer& c, size_t threads) {
                 return std::make_unique<Triad>(bytes_of(a), bytes_of(b, false), bytes_of(c, false),
                                                threads);
               }),
           py::arg("a"), py::arg("b"), py::arg("c"), py::arg("threads"), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>())
      .def("run", &Triad::run, py::arg("calls"), Unlocked());
}

void register_lanes(py::module_& m) {
  py::class_<Lanes>(m, "BenchLanes")
      .def(py::init([](std::vector<int> sockets, const py::buffer& buffer, bool threads) {
             return std::make_unique<Lanes>(std::move(sockets), bytes_of(buffer),
                                            threads ? LaneMode::kThreads : LaneMode::kPoll);
           }),
           py::arg("sockets"), py::arg("buffer"), py::arg("threads"), py::keep_alive<1, 3>())
      .def("read", &Lanes::read, py::arg("calls"), Unlocked())
      .def("write", &Lanes::write, py::arg("calls"), Unlocked())
      .def("read_times", &Lanes::read_times, py::arg("calls"), Unlocked())
      .def("serve", &Lanes::serve, Unlocked());
}

}  // namespace

void register_smb_bench(py::module_& m) {
  register_bench_client(m);
  register_triad(m);
  register_lanes(m);
}

}  // namespace hbm
