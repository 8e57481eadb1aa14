// The duration of a test that finds more the longer it runs.
#pragma once

#include <cstdlib>

namespace hbm {

// The number in an environment variable such as HBM_STRESS_KILLS; `otherwise` when it is not set.
inline int stress(const char* variable, int otherwise) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? otherwise : std::atoi(value);
}

}  // namespace hbm
