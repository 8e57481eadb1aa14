#include "box/server/storage/descriptors.h"

#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <string>

#include "base/descriptor.h"
#include "base/error.h"

namespace hbm::box {
namespace {

constexpr rlim_t kFewest = 64;

}  // namespace

// The kernel gives the lowest number that is free: what segments leave alone are the last numbers.
void require_descriptor() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t most = limit.rlim_cur;
  const rlim_t kept = std::min(std::max(kFewest, most / 8), most / 2);
  const Descriptor next(eventfd(0, EFD_CLOEXEC));
  if (next && static_cast<rlim_t>(next.get()) < most - kept) return;
  throw Error(ErrorKind::kExhausted,
              "the box may open " + std::to_string(most) + " files, a segment each, and keeps " +
                  std::to_string(kept) +
                  " of them for clients that come in: free segments, or raise the limit on open "
                  "files (ulimit -n)");
}

}  // namespace hbm::box
