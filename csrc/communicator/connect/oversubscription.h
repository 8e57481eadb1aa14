// Detects oversubscription: more ranks than usable processors on a machine. Each wait of such ranks
// lasts until the other ranks have had time slices. So they never spin, and they stage larger
// chunks to wait less often.
//
// Threads: any thread may call every function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bootstrap/rendezvous.h"

namespace hbm::communicator::connect {

// Returns the processors on which this thread may run, in the form in which ranks exchange them: a
// mask in hexadecimal. Its first digit has processors 0 to 3.
std::string allowed_processors();

// Returns the number of processors in the union of the masks.
size_t count_processors(const std::vector<std::string>& masks);

// Returns the CPU quota of this process' control group, in the form in which ranks exchange it. The
// text has the number of processors and an id of the control group, as in "2 4711". Empty if there
// is no quota.
std::string allowed_quota();

// Returns the number of processors that the ranks may keep busy: the union of their masks. If every
// rank has a quota, the result is at most the sum of the quotas of their control groups. Does not
// see a quota that several control groups share.
size_t usable_processors(const std::vector<int>& ranks,
                         const std::vector<bootstrap::Member>& members);

// Returns the largest argument of all count_group() calls in this process; at least 1.
int most_ranks();

// Records that a group of this process has `ranks` ranks on this machine.
void count_group(int ranks);

struct ProcessorDemand {
  int ranks = 1;
  size_t processors = 1;

  bool oversubscribed() const noexcept { return static_cast<size_t>(ranks) > processors; }
};

// Returns the demand of the ranks `local`, which are on one machine. The result is the same on all
// these ranks. Counts the ranks on this machine of the largest group that any of these ranks has
// been in, because ranks of other groups need processors too.
ProcessorDemand processor_demand(const std::vector<int>& local,
                                 const std::vector<bootstrap::Member>& members);

// Returns the bytes of the smallest segment of the ranks `local`.
uint64_t least_segment_bytes(const std::vector<int>& local,
                             const std::vector<bootstrap::Member>& members);

// Returns the bytes that a rank stages at a time in the slots of shared memory. It is 128 KiB, so
// that the slots of a few ranks fit the processor's cache. It is 1 MiB if the ranks are
// oversubscribed, because each chunk then costs a time slice of every rank. The chunk is halved,
// down to 4 KiB, while the slots would take more than half of `staging_bytes`, or more than an
// eighth of `segment_bytes`. So the segment has room for other groups and for tensors. Messages
// over MPI have a chunk of their own (mpi::chunk_bytes()).
size_t shm_slot_chunk(uint64_t staging_bytes, uint64_t segment_bytes, bool oversubscribed);

}  // namespace hbm::communicator::connect
