// The export of libhbm_memkind.so.
#include "memory/libraries.h"

extern "C" __attribute__((visibility("default"))) const hbm::memory::Libraries* hbm_memkind() {
  return &hbm::memory::libraries();
}
