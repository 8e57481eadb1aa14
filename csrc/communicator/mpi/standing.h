// Where the ranks of a group stand with MPI before the group has its communicator.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <string>
#include <vector>

namespace hbm::mpi {

struct MpiState {
  std::string node;       // equal on ranks that MPI may take as sharing a node
  std::string new_world;  // what this rank would call a world that it had to make
  std::string world_id;   // of its MPI world; empty: none, or one that has no name yet
  int world_rank = -1;    // -1: MPI is not initialised
  int world_size = 0;
};

// As one line, and back.
std::string encode(const MpiState& standing);
MpiState decode(const std::string& record);

// True if all ranks are in one world that exists; false if none has a world. Throws
// Error(kUnavailable), saying what to do, if they fit neither.
bool share_a_world(const std::vector<MpiState>& ranks, const std::string& group);

// Numbers the nodes by their first rank: node_of[r].
std::vector<int> nodes_of(const std::vector<MpiState>& ranks);

}  // namespace hbm::mpi
