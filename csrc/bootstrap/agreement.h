// A step of bootstrap in which the ranks find out what holds on all of them. It takes one key of
// the store, however many they are, and the last rank to come has asked one question; where ranks
// wait for others for 200 ms, it takes one more key for each.
//
// Threads: as gather.h.
#pragma once

#include <optional>
#include <string>

#include "bootstrap/gather.h"

namespace hbm::bootstrap {

inline constexpr int kMostFacts = 2;

// Says which facts hold on this rank: the bits 0 to kMostFacts - 1. Once for each `step`, by every
// rank. Does not wait for the others. Returns what held_by_all() would, if this rank is the last.
std::optional<unsigned> vouch(const Participant& participant, const std::string& step,
                              unsigned facts);

// Returns the facts that hold on all ranks, the same on all, once all have vouched. REQUIRES: this
// rank has. Throws Error(kTimeout) naming the ranks that did not come, Error(kDeath) naming one
// that has died before all have come.
unsigned held_by_all(const Participant& participant, const std::string& step);

// Makes sure that no rank passes the step that has not passed it yet. Once for each `step`.
void spoil(const Participant& participant, const std::string& step);

}  // namespace hbm::bootstrap
