// Seeds of random tests. HBMCOMM_TEST_SEED is the seed of a run, fresh by default. A test's own
// seeds depend on it and on the test's name alone. A failed test prints the variable.
#pragma once

#include <cstdint>
#include <random>

namespace hbm {

// Returns another seed of the running test. A forked process draws the same next seed as its
// parent.
uint64_t test_seed();

inline std::mt19937_64 test_random() { return std::mt19937_64(test_seed()); }

// Adds a listener that prints the seed of a failed test; true, for the constant below.
bool print_seeds();
inline const bool kPrintsSeeds = print_seeds();

}  // namespace hbm
