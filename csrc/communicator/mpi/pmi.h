// A PMI-1 responder: forms an MPI job without a launcher.
//
// MPICH asks whoever started it for its rank, its size, who shares its node and the other ranks'
// addresses, in a line protocol (PMI-1) over an inherited descriptor. The responder is a thread of
// the same process that answers over a socket pair, with a key-value store shared by the ranks
// behind it. docs/design/bootstrap.md tells why.
//
// Threads: the responder never takes the interpreter's lock, so MPI_Init may run with it held
// elsewhere. PMI failures inside MPI_Init never return; the caller runs it abandonably.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/key_value.h"

namespace hbm::mpi {

// PMI's description of which ranks share a node: "(vector,(first node, nodes, ranks a node),...)".
// node_of[r] numbers rank r's node by order of first appearance. Ranks of a node need not be
// neighbours.
std::string process_mapping(const std::vector<int>& node_of);

class PmiResponder {
 public:
  struct Job {
    std::string name;  // unique per job: MPICH names its shared segment after it
    int rank = 0;
    int size = 1;
    std::vector<int> node_of;  // see process_mapping()
    std::chrono::steady_clock::time_point deadline;
    bool is_elsewhere = false;  // a process started meanwhile calls MPI_Init, not this one
  };

  // Starts answering, and sets PMI_FD, PMI_RANK and PMI_SIZE for the MPI_Init that follows.
  PmiResponder(std::shared_ptr<KeyValue> store, Job job);

  // Ends the thread, in a barrier too, and clears the environment variables. MPI keeps its end of
  // the socket, unless it is in another process. A call of MPI that asks later ends the process.
  ~PmiResponder();

  // Clears the environment variables and releases the store, as MPI_Init has returned on every
  // rank. Goes on answering for MPI_Finalize, whose barrier waits for no other rank then: a rank
  // that disconnects first does no harm (ucx_guard.h).
  void release_store();

  PmiResponder(const PmiResponder&) = delete;
  PmiResponder& operator=(const PmiResponder&) = delete;

 private:
  void serve();
  std::string answer(const std::string& line);
  bool barrier(KeyValue& store);

  std::shared_ptr<KeyValue> store();

  std::mutex mutex_;  // guards store_
  std::shared_ptr<KeyValue> store_;
  const Job job_;
  const std::string mapping_;
  int barriers_ = 0;
  int client_ = -1;  // MPI's end
  int server_ = -1;
  std::atomic<bool> is_ending_{false};
  std::thread thread_;
};

}  // namespace hbm::mpi
