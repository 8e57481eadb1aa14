// How many ranks of a machine want how many processors. Where ranks are more, each wait lasts until
// the others have had their turns: they do not spin, and stage more at a time so as to wait less
// often.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bootstrap/rendezvous.h"

namespace hbm {

// Where a rank may run, as it tells the others: a mask in hexadecimal, whose first digit has
// processors 0 to 3.
std::string allowed_processors();

// The processors in any of these masks.
size_t count_processors(const std::vector<std::string>& masks);

// The part of them that its control groups leave, as a rank tells it: how many may work all the
// time and the group that says so, as in "2 4711"; empty without a quota.
std::string allowed_quota();

// The processors that these ranks may keep busy: those in any of their masks, and no more than the
// quotas of their groups together, if each has one. A quota above these groups, which several of
// them share, is not seen.
size_t usable_processors(const std::vector<int>& ranks,
                         const std::vector<bootstrap::Member>& members);

// The most ranks of one machine that a group of this process had: of those counted, 1 at least.
int most_ranks();

// Counts a group of this process, with `ranks` of one machine.
void count_group(int ranks);

struct Crowd {
  int ranks = 1;
  size_t processors = 1;

  bool crowded() const noexcept { return static_cast<size_t>(ranks) > processors; }
};

// The crowd of the ranks `local` of one machine: the same for all of them. It counts the ranks of
// the largest group that any of them has been in, because those of other groups want processors
// too.
Crowd crowd_of(const std::vector<int>& local, const std::vector<bootstrap::Member>& members);

// Returns the bytes that a rank stages at a time in the slots of shared memory: 128 KiB, so that
// the slots of a few ranks fit the processor's cache, or 1 MiB in a crowd, where each chunk costs a
// turn of every rank on a processor. The chunk is halved, down to 4 KiB, while the slots would take
// more than half of `staging_bytes`. It has nothing to do with the chunk of messages over MPI
// (mpi::chunk_bytes()).
size_t shm_slot_chunk(uint64_t staging_bytes, bool crowded);

}  // namespace hbm
