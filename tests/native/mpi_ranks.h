// Ranks over real MPI, for tests without a launcher. The ranks are processes, forked from a process
// that has neither threads nor MPI yet.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "communicator/mpi/communicator.h"
#include "forked_ranks.h"
#include "progress/operation_queue.h"

namespace hbm::communicator::mpi {

inline constexpr std::chrono::milliseconds kTimeout{60'000};

// The parts of a process group: the communicator over its channel, and the two queues. Stops the
// queues when it is destroyed.
class Group {
 public:
  // All ranks call the constructor, with the same name and chunk. The first group forms the MPI
  // world; later groups get communicators of that world.
  Group(const std::filesystem::path& directory, const std::string& name, int rank, int size,
        size_t chunk_bytes);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  std::shared_ptr<Channel> channel;
  std::shared_ptr<MpiCommunicator> communicator;
  std::shared_ptr<progress::OperationQueue> collectives;
  std::shared_ptr<progress::OperationQueue> transfers;
  uint64_t sequence = 0;

  // Runs a collective to its end. Returns its error, or null.
  std::exception_ptr run(std::unique_ptr<progress::Operation> operation,
                         std::chrono::milliseconds timeout = kTimeout);
};

struct Rank : ForkedRank {
  Group group(const std::string& name, size_t chunk_bytes) const {
    return {directory, name, rank, size, chunk_bytes};
  }
};

// Runs run_forked_ranks(), and checks that ranks not in `killed` leave no name in /dev/shm. Skips
// the test where there is no MPI library.
void run_ranks(int size, const std::function<void(const Rank&)>& body,
               const std::set<int>& killed = {});

}  // namespace hbm::communicator::mpi
