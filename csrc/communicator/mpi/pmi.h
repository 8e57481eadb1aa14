// A PMI-1 responder: forms an MPI job without a launcher.
//
// MPICH asks its launcher for the rank's number, the size of the job, the ranks on this node, and
// the addresses of other ranks. For this MPICH uses a line protocol (PMI-1) over an inherited
// descriptor. The responder, a thread of the rank's own process, answers these questions over a
// socket pair. It gets the addresses of other ranks from a key-value store that the ranks share.
// docs/design/bootstrap.md has the reasons.
//
// Threads: the responder never takes the interpreter's lock, so MPI_Init may run while another
// thread holds it. If PMI fails inside MPI_Init, MPI_Init never returns; the caller must be able to
// abandon the call.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/key_value.h"

namespace hbm::communicator::mpi {

// Returns PMI's description of the ranks that share a node: "(vector,(first node, nodes, ranks a
// node),...)". node_of[r] is the node of rank r, numbered by first appearance. Ranks of a node need
// not be consecutive.
std::string process_mapping(const std::vector<int>& node_of);

class PmiResponder {
 public:
  struct Job {
    std::string name;  // unique for each job: MPICH names its shared segment after it
    int rank = 0;
    int size = 1;
    std::vector<int> node_of;  // see process_mapping()
    std::chrono::steady_clock::time_point deadline;
    bool is_elsewhere = false;  // another process calls MPI_Init, not this one
  };

  // Starts the responder, and sets PMI_FD, PMI_RANK and PMI_SIZE for the MPI_Init that follows.
  PmiResponder(std::shared_ptr<bootstrap::KeyValue> store, Job job);

  // Ends the thread, also if it waits in a barrier, and clears the environment variables. MPI keeps
  // its end of the socket, unless MPI is in another process. If MPI asks a question later, the
  // process ends.
  ~PmiResponder();

  // Clears the environment variables and releases the store. REQUIRES: MPI_Init has returned on
  // every rank. The responder continues to answer MPI_Finalize, whose barrier then waits for no
  // other rank. A rank that disconnects first does no harm (ucx_guard.h).
  void release_store();

  PmiResponder(const PmiResponder&) = delete;
  PmiResponder& operator=(const PmiResponder&) = delete;

 private:
  void serve();
  std::string answer(const std::string& line);
  bool barrier(bootstrap::KeyValue& store);

  std::shared_ptr<bootstrap::KeyValue> store();

  std::mutex mutex_;  // guards store_
  std::shared_ptr<bootstrap::KeyValue> store_;
  const Job job_;
  const std::string mapping_;
  int barriers_ = 0;
  int client_ = -1;  // MPI's end
  int server_ = -1;
  std::atomic<bool> is_ending_{false};
  std::thread thread_;
};

}  // namespace hbm::communicator::mpi
