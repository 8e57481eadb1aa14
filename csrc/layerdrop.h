// Layer dropping's search for the threshold. The file keeps the one-word name by which users
// include it.
//
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <vector>

namespace hbm::layerdrop {

// Returns the threshold of Lee et al. 2020, Algorithm 1, as its text defines it. Layers are added
// in ascending order of their scores; a NaN counts as infinite. The result is the score of the
// first layer with which more than `ratio` of all elements have been added. It is -1 if there is no
// such layer, because no layer has elements. Throws Error(kInvalid) for lists of different lengths,
// a negative size, or a ratio outside [0, 1).
double threshold(const std::vector<double>& scores, const std::vector<int64_t>& sizes,
                 double ratio);

}  // namespace hbm::layerdrop
