#include "communicator/mpi/segments.h"

#include <unistd.h>

#include <fstream>

namespace hbm::communicator::mpi {

void unlink_segments(const std::string& process) noexcept try {
  std::ifstream maps("/proc/" + process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find("/dev/shm/mpich_");
    if (path != std::string::npos) unlink(line.c_str() + path);
  }
} catch (const std::exception&) {  // no memory
}

}  // namespace hbm::communicator::mpi
