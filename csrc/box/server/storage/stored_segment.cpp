#include "box/server/storage/stored_segment.h"

#include <unistd.h>

#include <cstring>

#include "base/log.h"

namespace hbm::box {

StoredSegment::~StoredSegment() {
  if (!remove_.load(std::memory_order_relaxed) || unlink(path.c_str()) == 0) return;
  const char* cause = std::strerror(errno);
  log::warn("cannot remove " + path + ", which is not in use any more: " + cause);
}

}  // namespace hbm::box
