// The duration of stress tests: the longer they run, the more they may find.
#pragma once

#include <cstdlib>

namespace hbm {

// Returns the number in an environment variable such as HBM_STRESS_KILLS, or `otherwise` if the
// variable is not set.
inline int stress(const char* variable, int otherwise) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? otherwise : std::atoi(value);
}

}  // namespace hbm
