// A step of group formation that finds the facts which hold on all ranks. A fact is, for example,
// that the rank has mapped the segments of all ranks of its machine.
//
// The step uses one key of the store, a counter, to which each rank adds. The last rank to add
// learns the result from the store's answer to its addition; the other ranks read the counter. A
// rank that has waited for other ranks for 200 ms (kNamelessWait) writes a key of its own, so that
// errors can name the missing ranks.
//
// Threads: as in gather.h.
#pragma once

#include <optional>
#include <string>

#include "bootstrap/gather.h"

namespace hbm::bootstrap {

inline constexpr int kMostFacts = 2;

// Adds this rank to the step's counter, with the facts that hold on it: bits 0 to kMostFacts - 1 of
// `facts`. Does not wait for other ranks. Returns the result of held_by_all() if this rank is the
// last to arrive, else nothing. Every rank calls it once for each `step`.
std::optional<unsigned> vouch(const Participant& participant, const std::string& step,
                              unsigned facts);

// Returns the facts that hold on all ranks, once every rank has called vouch(). The result is the
// same on all ranks. REQUIRES: this rank has called vouch(). Throws Error(kTimeout) naming the
// missing ranks, Error(kDeath) naming a rank that has died before all arrived.
unsigned held_by_all(const Participant& participant, const std::string& step);

// Raises the step's counter above any sum that the ranks can reach. A rank that has not completed
// the step can then never complete it. Called once for each `step`.
void spoil(const Participant& participant, const std::string& step);

}  // namespace hbm::bootstrap
