#include "bindings/smb_module.h"

#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "bindings/smb_stats_bindings.h"
#include "box/server.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

using namespace py::literals;
using box::Server;
using Unlocked = py::call_guard<py::gil_scoped_release>;

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

std::shared_ptr<Server> serve(const std::vector<std::string>& listen, bool unix_socket,
                              const std::string& socket_path, uint64_t memory,
                              const std::string& policy, uint64_t smallest_block,
                              uint64_t largest_block, const std::string& store, bool sync,
                              const std::string& token, bool seal, double lease,
                              uint32_t most_clients, uint32_t handlers, uint32_t accumulate_threads,
                              uint32_t receivers, const std::string& verbs,
                              const std::string& verbs_host, uint16_t verbs_port) {
  const box::ServerOptions options{
      .listen = listen,
      .unix_socket = unix_socket,
      .socket_path = socket_path,
      .memory = memory,
      .policy = memory::parse_policy(policy),
      .smallest_block = smallest_block,
      .largest_block = largest_block,
      .store = store,
      .sync = sync,
      .token = token,
      .seal = seal,
      .lease = milliseconds(lease),
      .most_clients = most_clients,
      .handlers = handlers,
      .accumulate_threads = accumulate_threads,
      .receivers = receivers,
      .verbs = box::parse_verbs(verbs),
      .verbs_host = verbs_host,
      .verbs_port = verbs_port,
  };
  const py::gil_scoped_release unlocked;
  return {new Server(options), [](Server* last) {
            const py::gil_scoped_release unlocked;
            delete last;
          }};
}

py::dict stats(const Server& server) {
  box::ServerStats found;
  {
    const py::gil_scoped_release unlocked;
    found = server.stats();
  }
  py::dict dict = stats_dict(found.box);
  size_t row = 0;
  for (const py::handle client : dict["client_table"]) client["host"_s] = found.box.hosts[row++];
  dict["pool"] =
      py::dict("capacity_bytes"_a = found.pool.capacity, "used_bytes"_a = found.pool.used,
               "blocks"_a = found.pool.blocks, "largest_free_bytes"_a = found.pool.largest_free,
               "fragmentation"_a = found.pool.fragmentation);
  return dict;
}

}  // namespace

void register_smb_server(py::module_& m) {
  py::class_<Server, std::shared_ptr<Server>>(m, "Server")
      .def(py::init(&serve), py::kw_only(), py::arg("listen"), py::arg("unix_socket"),
           py::arg("socket_path"), py::arg("memory"), py::arg("policy"), py::arg("smallest_block"),
           py::arg("largest_block"), py::arg("store"), py::arg("sync"), py::arg("token"),
           py::arg("seal"), py::arg("lease"), py::arg("most_clients"), py::arg("handlers"),
           py::arg("accumulate_threads"), py::arg("receivers"), py::arg("verbs"),
           py::arg("verbs_host"), py::arg("verbs_port"))
      .def_property_readonly("url", &Server::url)
      .def_property_readonly("urls", &Server::urls)
      .def_property_readonly("closed", &Server::closed)
      .def("stats", &stats)
      .def(
          "drain", [](Server& server, double most) { server.drain(milliseconds(most)); },
          py::arg("most"), Unlocked())
      .def("close", &Server::close, Unlocked());
  m.def("why_no_verbs", &box::why_no_verbs, Unlocked());
}

}  // namespace hbm::bindings
