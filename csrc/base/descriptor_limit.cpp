#include "base/descriptor_limit.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <iterator>
#include <system_error>

#include "base/descriptor.h"
#include "base/tuning.h"

namespace hbm {
std::string shortage_of_descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const Descriptor probe(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));
  bool few = !probe && errno == EMFILE;
  if (!few) {
    std::error_code none;
    const std::filesystem::directory_iterator files("/proc/self/fd", none);
    const auto open = none ? 0 : std::distance(begin(files), end(files));
    few = static_cast<rlim_t>(open) + kFewDescriptorsLeft >= limit.rlim_cur;
  }
  if (!few) return {};
  return "; this process has too many open files for its limit of " +
         std::to_string(limit.rlim_cur) + " (raise ulimit -n)";
}

}  // namespace hbm
