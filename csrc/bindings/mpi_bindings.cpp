#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <string>
#include <utility>

#include "bindings/module.h"
#include "communicator/mpi/library.h"
#include "communicator/mpi/world.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

py::dict mpi_info() {
  using namespace py::literals;
  const communicator::mpi::MpiLibrary& library = communicator::mpi::library();
  return py::dict("library"_a = library.path, "version"_a = library.api->version(),
                  "abi"_a = library.api->abi(), "found_by"_a = library.found_by);
}

}  // namespace

void register_mpi(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("mpi_info", &mpi_info);
  m.def(
      "mpi_launched",
      [](std::chrono::milliseconds timeout) {
        const communicator::mpi::World& world =
            communicator::mpi::World::launched(std::chrono::steady_clock::now() + timeout);
        return std::make_pair(world.rank(), world.size());
      },
      py::arg("timeout"), Unlocked());
  m.def(
      "mpi_broadcast",
      [](const std::string& value, std::chrono::milliseconds timeout) {
        const auto deadline = std::chrono::steady_clock::now() + timeout;
        return communicator::mpi::World::launched(deadline).broadcast(value, deadline);
      },
      py::arg("value"), py::arg("timeout"), Unlocked());
  m.def(
      "mpi_finalize",
      [](std::chrono::milliseconds timeout) {
        if (communicator::mpi::World* world = communicator::mpi::World::current())
          world->finalize_together(timeout);
      },
      py::arg("timeout"), Unlocked());
}

}  // namespace hbm::bindings
