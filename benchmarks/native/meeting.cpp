#include "meeting.h"

#include <memory>

#include "file_store.h"

namespace hbm::bench {
namespace {

constexpr uint64_t kStagingBytes = 128 << 10;  // unused, but must be equal on all ranks

}  // namespace

bootstrap::Rendezvous meet(const RankPlace& place,
                           const std::function<void(bootstrap::Member&)>& tell) {
  return bootstrap::meet(std::make_shared<FileStore>(place.directory), place.rank, place.size,
                         "the benchmark", std::chrono::steady_clock::now() + kPatience, [&] {
                           auto self = bootstrap::introduce("benchmark", kStagingBytes);
                           tell(self);
                           return self;
                         });
}

communicator::mpi::MpiConnection connect_by_mpi(const RankPlace& place) {
  return communicator::mpi::connect(meet(place, [](bootstrap::Member&) {}), {});
}

}  // namespace hbm::bench
