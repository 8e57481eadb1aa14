// Layer dropping's search for the threshold.
#pragma once

#include <cstdint>
#include <vector>

namespace hbm::layerdrop {

// Lee et al. 2020, Algorithm 1, as its text defines the result: of the layers taken from the
// smallest representative up (a NaN is infinite), the representative of the first one with which
// more than `ratio` of all elements have been taken; -1 if there is none, as without elements.
// Throws Error(kInvalid) for lists of different lengths, a negative size, a ratio outside [0, 1).
double threshold(const std::vector<double>& representatives, const std::vector<int64_t>& sizes,
                 double ratio);

}  // namespace hbm::layerdrop
