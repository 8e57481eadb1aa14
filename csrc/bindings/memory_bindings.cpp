#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/module.h"
#include "memory/control_group.h"
#include "memory/cpu_binding.h"
#include "memory/libraries.h"
#include "memory/placement.h"
#include "memory/policy.h"
#include "memory/room.h"
#include "memory/segment.h"
#include "memory/speed.h"
#include "memory/topology.h"
#include "process_group/segment_allocator.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

void check_size(const std::vector<int64_t>& shape, c10::ScalarType dtype) {
  size_t bytes = c10::elementSize(dtype);
  bool fits = true;
  for (const int64_t extent : shape) {
    if (extent < 0) {
      throw Error(ErrorKind::kInvalid, "a shape has no negative extent: " + std::to_string(extent));
    }
    fits &= !__builtin_mul_overflow(bytes, static_cast<size_t>(extent), &bytes);
  }
  if (!fits || bytes > static_cast<size_t>(std::numeric_limits<int64_t>::max())) {
    throw Error(ErrorKind::kInvalid, "the shape is larger than the address space");
  }
}

at::Tensor empty(const std::vector<int64_t>& shape, c10::ScalarType dtype,
                 const std::string& policy) {
  if (c10::isQIntType(dtype)) {
    throw Error(ErrorKind::kUnsupported,
                std::string("no quantized tensors: ") + c10::toString(dtype));
  }
  check_size(shape, dtype);
  return process_group::tensor_in(memory::process_segment(memory::parse_policy(policy)), shape,
                                  dtype);
}

std::map<int, uint64_t> where(uintptr_t address, size_t bytes) {
  return memory::where(reinterpret_cast<const void*>(address), bytes);
}

at::Tensor on_node(int node, size_t bytes) {
  std::shared_ptr<void> block = memory::block_on_node(node, bytes);
  void* const data = block.get();
  return at::from_blob(
      data, {static_cast<int64_t>(bytes)},
      [block = std::move(block)](void*) mutable { block.reset(); }, at::TensorOptions(at::kByte));
}

double load_seconds(const at::Tensor& block) {
  return memory::load_seconds(block.data_ptr(), block.nbytes());
}

std::string bind(const std::string& mode, int local_rank, int local_size) {
  return memory::bind(memory::parse_bind_mode(mode), local_rank, local_size);
}

py::dict as_dict(const memory::NodeInfo& node) {
  using namespace py::literals;
  return py::dict("id"_a = node.id, "total_bytes"_a = node.total_bytes,
                  "free_bytes"_a = node.free_bytes, "room_bytes"_a = node.room_bytes,
                  "is_hbm"_a = node.is_hbm, "has_cpus"_a = node.has_cpus, "cpus"_a = node.cpus);
}

py::dict as_dict(memory::Policy policy, const memory::SharedSegmentStats& stats) {
  using namespace py::literals;
  return py::dict("policy"_a = memory::policy_name(policy), "in_use_bytes"_a = stats.in_use_bytes,
                  "peak_bytes"_a = stats.peak_bytes, "hbm_bytes"_a = stats.hbm_bytes,
                  "ddr_bytes"_a = stats.ddr_bytes, "allocations"_a = stats.allocations,
                  "spills"_a = stats.spills, "page_bytes"_a = stats.page_bytes);
}

std::string memkind_version() {
  const int version = memory::libraries().get_version();  // major * 1000000 + minor * 1000 + patch
  return std::to_string(version / 1000000) + "." + std::to_string(version / 1000 % 1000) + "." +
         std::to_string(version % 1000);
}

py::dict info() {
  using namespace py::literals;
  memory::Topology found;
  {
    py::gil_scoped_release unlocked;
    found = memory::discover();
  }
  py::list nodes;
  for (const memory::NodeInfo& node : found.nodes) nodes.append(as_dict(node));
  py::list segments;
  for (const auto& [policy, stats] : memory::process_segment_stats()) {
    segments.append(as_dict(policy, stats));
  }
  return py::dict(
      "hbm_available"_a = found.hbm_available, "hbm_source"_a = found.hbm_source,
      "mode"_a = memory::memory_mode_name(found.mode), "mode_source"_a = found.mode_source,
      "cluster"_a = found.cluster, "cpu_node"_a = found.cpu_node, "cpu_nodes"_a = found.cpu_nodes,
      "room_bytes"_a = memory::machine_room(), "closest_hbm_nodes"_a = found.closest_hbm,
      "memkind_version"_a = memkind_version(), "nodes"_a = nodes, "segments"_a = segments);
}

}  // namespace

void register_memory(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def(
      "memory_available", [] { return memory::why_unavailable(memory::Policy::kBind).empty(); },
      Unlocked());
  m.def("memory_info", &info);
  m.def(
      "memory_named_by_user",
      [](const std::string& policy) { memory::named_by_user(memory::parse_policy(policy)); },
      py::arg("policy"));
  m.def("memory_empty", &empty, py::arg("shape"), py::arg("dtype"), py::arg("policy"), Unlocked());
  m.def(
      "install_cpu_allocator",
      [](const std::string& policy) {
        process_group::install_cpu_allocator(memory::parse_policy(policy));
      },
      py::arg("policy"), Unlocked());
  m.def("memory_where", &where, py::arg("address"), py::arg("bytes"), Unlocked());
  m.def("core_quota", [] { return memory::core_quota().cores; });
  m.def("memory_on_node", &on_node, py::arg("node"), py::arg("bytes"), Unlocked());
  m.def("memory_load_seconds", &load_seconds, py::arg("block"), Unlocked());
  m.def("memory_bind", &bind, py::arg("mode"), py::arg("local_rank"), py::arg("local_size"),
        Unlocked());
}

}  // namespace hbm::bindings
