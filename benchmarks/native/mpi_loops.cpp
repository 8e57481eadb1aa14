#include "mpi_loops.h"

#include <mpi.h>

#include <array>
#include <map>
#include <string>
#include <utility>

#include "base/error.h"
#include "collective_loops.h"

namespace hbm::bench {
namespace {

using MpiCall = std::function<int()>;  // returns MPI's error code

MPI_Datatype type_of(Dtype dtype) {
  if (dtype == Dtype::kFloat32) return MPI_FLOAT;
  if (dtype == Dtype::kFloat64) return MPI_DOUBLE;
  if (dtype == Dtype::kInt32) return MPI_INT32_T;
  throw Error(
      ErrorKind::kInvalid,
      std::string("MPI is measured in float32, float64 and int32, not ") + dtype_name(dtype));
}

// Makes functions that each call one collective on a rank's buffers.
class MpiCalls {
 public:
  MpiCalls(const MpiWorld& world, const CollectiveBuffers& buffers)
      : rank_(world.rank),
        size_(world.size),
        world_(world),
        sent_(buffers.sent),
        received_(buffers.received),
        elements_(buffers.count),
        type_(type_of(buffers.dtype)) {}

  MpiCall allreduce() const {
    const auto allreduce = world_.function<decltype(::MPI_Allreduce)>("MPI_Allreduce");
    return [=, data = received_, count = count(), type = type_] {
      return allreduce(MPI_IN_PLACE, data, count, type, MPI_SUM, MPI_COMM_WORLD);
    };
  }

  MpiCall broadcast() const {
    const auto broadcast = world_.function<decltype(::MPI_Bcast)>("MPI_Bcast");
    return [=, data = received_, count = count(), type = type_] {
      return broadcast(data, count, type, 0, MPI_COMM_WORLD);
    };
  }

  MpiCall reduce() const {
    const auto reduce = world_.function<decltype(::MPI_Reduce)>("MPI_Reduce");
    return [=, root = root(), data = received_, count = count(), type = type_] {
      return reduce(root ? MPI_IN_PLACE : data, root ? data : nullptr, count, type, MPI_SUM, 0,
                    MPI_COMM_WORLD);
    };
  }

  MpiCall allgather() const {
    const auto allgather = world_.function<decltype(::MPI_Allgather)>("MPI_Allgather");
    return [=, own = sent_, gathered = received_, part = part(), type = type_] {
      return allgather(own, part, type, gathered, part, type, MPI_COMM_WORLD);
    };
  }

  MpiCall gather() const {
    const auto gather = world_.function<decltype(::MPI_Gather)>("MPI_Gather");
    return [=, own = sent_, gathered = received_, part = part(), type = type_] {
      return gather(own, part, type, gathered, part, type, 0, MPI_COMM_WORLD);
    };
  }

  MpiCall gather_in_place() const {
    const auto gather = world_.function<decltype(::MPI_Gather)>("MPI_Gather");
    return [=, root = root(), data = received_, part = part(), type = type_] {
      return gather(root ? MPI_IN_PLACE : data, part, type, root ? data : nullptr, part, type, 0,
                    MPI_COMM_WORLD);
    };
  }

  MpiCall scatter() const {
    const auto scatter = world_.function<decltype(::MPI_Scatter)>("MPI_Scatter");
    return [=, scattered = sent_, own = received_, part = part(), type = type_] {
      return scatter(scattered, part, type, own, part, type, 0, MPI_COMM_WORLD);
    };
  }

  MpiCall reduce_scatter() const {
    const auto call =
        world_.function<decltype(::MPI_Reduce_scatter_block)>("MPI_Reduce_scatter_block");
    return [=, scattered = sent_, own = received_, part = part(), type = type_] {
      return call(scattered, own, part, type, MPI_SUM, MPI_COMM_WORLD);
    };
  }

  MpiCall alltoall() const {
    const auto alltoall = world_.function<decltype(::MPI_Alltoall)>("MPI_Alltoall");
    return [=, sent = sent_, received = received_, part = part(), type = type_] {
      return alltoall(sent, part, type, received, part, type, MPI_COMM_WORLD);
    };
  }

  MpiCall barrier() const {
    const auto barrier = world_.function<decltype(::MPI_Barrier)>("MPI_Barrier");
    return [=] { return barrier(MPI_COMM_WORLD); };
  }

  MpiCall sendrecv() const {
    const auto send = world_.function<decltype(::MPI_Send)>("MPI_Send");
    const auto receive = world_.function<decltype(::MPI_Recv)>("MPI_Recv");
    const Pair pair(rank_, size_);
    return [=, data = received_, count = count(), type = type_] {
      if (!pair.whole) return MPI_SUCCESS;
      const auto sent = [&] { return send(data, count, type, pair.peer, 0, MPI_COMM_WORLD); };
      const auto received = [&] {
        return receive(data, count, type, pair.peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      };
      const int code = pair.first ? sent() : received();
      if (code != MPI_SUCCESS) return code;
      return pair.first ? received() : sent();
    };
  }

 private:
  bool root() const { return rank_ == 0; }
  int count() const { return static_cast<int>(elements_); }
  int part() const { return static_cast<int>(share_of(elements_, size_)); }

  const int rank_;
  const int size_;
  const MpiWorld world_;
  const void* const sent_;
  void* const received_;
  const size_t elements_;
  const MPI_Datatype type_;
};

const std::map<std::string, MpiCall (MpiCalls::*)() const> kCalls = {
    {"allreduce", &MpiCalls::allreduce}, {"broadcast", &MpiCalls::broadcast},
    {"reduce", &MpiCalls::reduce},       {"allgather", &MpiCalls::allgather},
    {"gather", &MpiCalls::gather},       {"gather_in_place", &MpiCalls::gather_in_place},
    {"scatter", &MpiCalls::scatter},     {"reduce_scatter", &MpiCalls::reduce_scatter},
    {"alltoall", &MpiCalls::alltoall},   {"barrier", &MpiCalls::barrier},
    {"sendrecv", &MpiCalls::sendrecv},
};

class MpiCollectives final : public Collectives {
 public:
  MpiCollectives(MpiWorld world, MakeMpiCall further)
      : world_(std::move(world)), further_(std::move(further)) {}

  int rank() const override { return world_.rank; }
  int size() const override { return world_.size; }

  std::function<void()> call(const std::string& collective,
                             const CollectiveBuffers& buffers) override {
    MpiCall made;
    if (const auto found = kCalls.find(collective); found != kCalls.end()) {
      made = (MpiCalls(world_, buffers).*found->second)();
    } else if (further_) {
      made = further_(world_, collective, buffers);
    }
    if (!made) throw Error(ErrorKind::kInvalid, "MPI has no loop of \"" + collective + "\"");
    return [this, collective, call = std::move(made)] {
      const int code = call();
      if (code != MPI_SUCCESS) fail(collective, code);
    };
  }

 private:
  [[noreturn]] void fail(const std::string& collective, int code) const {
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    const auto error_string = world_.function<decltype(::MPI_Error_string)>("MPI_Error_string");
    error_string(code, text.data(), &length);
    throw Error(ErrorKind::kNetwork, "MPI's " + collective + " failed: " +
                                         std::string(text.data(), static_cast<size_t>(length)));
  }

  const MpiWorld world_;
  const MakeMpiCall further_;
};

}  // namespace

int serve_mpi(const std::function<MpiWorld()>& join, MakeMpiCall further) {
  return serve_collectives(
      [&] { return std::make_unique<MpiCollectives>(join(), std::move(further)); });
}

}  // namespace hbm::bench
