#include "bindings/bench_bindings.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/error.h"
#include "communicator/mpi/library.h"
#include "communicator/mpi/world.h"
#include "pg_hbm.h"
#include "process_group/types.h"

namespace py = pybind11;

namespace hbm {
namespace {

// What an allreduce of `total` floats by `ranks` ranks costs the memory of one of them at the
// least: it reads its share of every rank's buffer, and writes the sum to all of them. Here the
// shares lie behind one another in `data`, and nobody waits for anybody. Plain loops that the
// compiler vectorises for its default target: a bound should owe nothing to our own kernels.
void reduce_two_shares(float* __restrict first, float* __restrict second, size_t share) {
  for (size_t i = 0; i < share; ++i) first[i] = second[i] = first[i] + second[i];
}

void reduce_shares(float* data, size_t share, size_t ranks) {
  std::array<float, 1024> sum;  // stays in the first cache
  for (size_t begin = 0; begin < share; begin += sum.size()) {
    const size_t count = std::min(sum.size(), share - begin);
    std::copy_n(data + begin, count, sum.begin());
    for (size_t rank = 1; rank < ranks; ++rank) {
      const float* source = data + rank * share + begin;
      for (size_t i = 0; i < count; ++i) sum[i] += source[i];
    }
    for (size_t rank = 0; rank < ranks; ++rank) {
      std::copy_n(sum.begin(), count, data + rank * share + begin);
    }
  }
}

void bound(uintptr_t address, size_t bytes, size_t ranks, int calls) {
  float* const data = reinterpret_cast<float*>(address);
  const size_t share = bytes / sizeof(float) / ranks;
  for (int call = 0; call < calls; ++call) {
    if (ranks == 2) {  // the usual count, in one pass
      reduce_two_shares(data, data + share, share);
    } else {
      reduce_shares(data, share, ranks);
    }
  }
}

// The operation below c10d: no dispatcher, no Work, no future.
void allreduce(ProcessGroupHbm& group, const at::Tensor& tensor, int calls) {
  translated([&] {
    group.repeat_allreduce(tensor.mutable_data_ptr(), static_cast<size_t>(tensor.numel()),
                           to_dtype(tensor.scalar_type()), calls);
  });
}

MPI_Datatype mpi_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return MPI_FLOAT;
    case at::kDouble:
      return MPI_DOUBLE;
    default:
      throw Error(
          ErrorKind::kUnsupported,
          std::string("MPI is measured in float32 and float64, not ") + c10::toString(type));
  }
}

void mpi_allreduce(const at::Tensor& tensor, int calls) {
  if (mpi::World::current() == nullptr) {
    throw Error(ErrorKind::kInvalid, "no MPI world yet: make a group over MPI first");
  }
  const mpi::MpiLibrary& mpi = mpi::library();
  const MPI_Datatype type = mpi_type(tensor.scalar_type());
  for (int call = 0; call < calls; ++call) {
    mpi.check(mpi.Allreduce(MPI_IN_PLACE, tensor.data_ptr(), static_cast<int>(tensor.numel()), type,
                            MPI_SUM, MPI_COMM_WORLD),
              "MPI_Allreduce");
  }
}

// `name`: of an operator that has been loaded and changes one tensor in place.
void torch_operator(const std::string& name, at::Tensor tensor, int calls) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  const auto typed = op.typed<at::Tensor&(at::Tensor&)>();
  for (int call = 0; call < calls; ++call) typed.call(tensor);
}

}  // namespace

void register_bench(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("bench_bound", &bound, py::arg("address"), py::arg("bytes"), py::arg("ranks"),
        py::arg("calls"), Unlocked());
  m.def("bench_allreduce", &allreduce, py::arg("group"), py::arg("tensor"), py::arg("calls"),
        Unlocked());
  m.def("bench_mpi_allreduce", &mpi_allreduce, py::arg("tensor"), py::arg("calls"), Unlocked());
  m.def("bench_operator", &torch_operator, py::arg("name"), py::arg("tensor"), py::arg("calls"),
        Unlocked());
}

}  // namespace hbm
