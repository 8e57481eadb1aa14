// Seeds of random tests. HBMCOMM_TEST_SEED is the seed of a run, fresh by default. The seeds that a
// test draws depend only on the run's seed, the test's name and the number of seeds drawn before.
// If a test fails, the variable is printed.
#pragma once

#include <cstdint>
#include <random>

namespace hbm {

// Returns the next seed of the running test. A forked process draws the same next seed as its
// parent.
uint64_t test_seed();

inline std::mt19937_64 test_random() { return std::mt19937_64(test_seed()); }

// Adds a listener that sets the run's seed, and prints it after a failed test. Always returns true,
// for the constant below.
bool print_seeds();
inline const bool kPrintsSeeds = print_seeds();

}  // namespace hbm
