// Ranks over real MPI, each on a NUMA node of its own, report where the buffers lie that they hand
// to MPI: the guest's half of test_mpi_buffers.py.
//
//   VM_RANKS=2 VM_POLICY=bind vm_mpi_buffers
//
// The program is linked with library() wrapped (CMakeLists.txt): what hbm takes for MPI's table of
// functions is one that notes each buffer and passes the call on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "communicator/mpi/communicator.h"
#include "communicator/mpi/library.h"
#include "memory/cpu_binding.h"
#include "memory/staging.h"
#include "mpi_ranks.h"
#include "report.h"

namespace hbm::mpi {
namespace {

constexpr uint64_t kStagingBytes = 64 << 20;
constexpr size_t kChunkBytes = 256 << 10;
constexpr size_t kCount = 1 << 20;

std::mutex mutex;                      // guards `handed`
std::map<const void*, size_t> handed;  // address -> bytes, the most of all calls

void note(const void* data, int bytes) {
  const std::lock_guard lock(mutex);
  size_t& most = handed[data];
  most = std::max(most, static_cast<size_t>(bytes));
}

const MpiLibrary* real = nullptr;

int isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
          MPI_Request* request) {
  note(data, count);
  return real->Isend(data, count, type, to, tag, comm, request);
}

int irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
          MPI_Request* request) {
  note(data, count);
  return real->Irecv(data, count, type, from, tag, comm, request);
}

}  // namespace

// The linker's names for the function and for its stand-in.
extern "C" const MpiLibrary& __real__ZN3hbm3mpi7libraryEv();
extern "C" const MpiLibrary& __wrap__ZN3hbm3mpi7libraryEv() {
  static const MpiLibrary noting = [] {
    real = &__real__ZN3hbm3mpi7libraryEv();
    MpiLibrary table = *real;
    table.Isend = isend;
    table.Irecv = irecv;
    return table;
  }();
  return noting;
}

namespace {

std::string setting(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) throw std::runtime_error(std::string(name) + " is not set");
  return value;
}

void run_collectives(const Rank& rank, memory::Policy policy) {
  memory::bind(memory::BindMode::kNuma, rank.rank, rank.size);
  Group group = rank.group("vm", kChunkBytes);
  group.channel->staging = memory::process_staging(policy, kStagingBytes);

  std::vector<float> values(kCount, static_cast<float>(rank.rank + 1));
  ASSERT_EQ(group.run(group.communicator->allreduce(group.sequence++, values.data(), values.data(),
                                                    kCount, Dtype::kFloat32, ReduceOp::kSum)),
            nullptr);
  const int sum = rank.size * (rank.size + 1) / 2;
  EXPECT_EQ(std::count(values.begin(), values.end(), static_cast<float>(sum)), kCount);

  if (rank.rank == 0) std::iota(values.begin(), values.end(), 0.0f);
  ASSERT_EQ(group.run(group.communicator->broadcast(group.sequence++, values.data(), kCount,
                                                    Dtype::kFloat32, /*root=*/0)),
            nullptr);
  EXPECT_EQ(values.back(), static_cast<float>(kCount - 1));
  ASSERT_EQ(group.run(group.communicator->barrier(group.sequence++)), nullptr);

  std::vector<Block> blocks;
  for (const auto& [data, bytes] : handed) blocks.push_back({data, bytes});
  report("rank " + std::to_string(rank.rank), blocks, "");
}

TEST(MpiBuffers, OfAnAllreduceAndABroadcast) {
  const memory::Policy policy = memory::parse_policy(setting("VM_POLICY"));
  run_ranks(std::stoi(setting("VM_RANKS")),
            [policy](const Rank& rank) { run_collectives(rank, policy); });
}

}  // namespace
}  // namespace hbm::mpi
