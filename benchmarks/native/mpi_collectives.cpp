// The program "mpi_collectives DIRECTORY RANK SIZE LIBRARIES": one rank of MPI's collectives
// (mpi_loops.h, staged_mpi.h), for an MPI with MPICH's ABI. No mpiexec starts it: ranks meet by
// files in DIRECTORY. The program searches the directory LIBRARIES for MPI's library.
#include <dlfcn.h>

#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "communicator/mpi/library.h"
#include "meeting.h"
#include "mpi_loops.h"
#include "staged_mpi.h"

namespace hbm::bench {
namespace {

MpiWorld join(const RankPlace& place) {
  auto connection = std::make_shared<communicator::mpi::MpiConnection>(connect_by_mpi(place));
  void* const library = dlopen(communicator::mpi::library().path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) throw Error(ErrorKind::kUnavailable, dlerror());
  return {place.rank, place.size, std::move(connection), library};
}

}  // namespace
}  // namespace hbm::bench

int main(int argc, char** argv) {
  using namespace hbm::bench;
  if (argc != 5) return 2;
  hbm::communicator::mpi::set_search_path({argv[4]});
  const RankPlace place{argv[1], std::stoi(argv[2]), std::stoi(argv[3])};
  return serve_mpi([&] { return join(place); }, staged_call);
}
