#include "base/start_thread.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <system_error>
#include <utility>

#include "base/tuning.h"

namespace hbm {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

uint64_t used_address_space() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

uint64_t stack_bytes() {
  pthread_attr_t attributes;
  size_t bytes = kAssumedStackBytes;
  if (pthread_getattr_default_np(&attributes) != 0) return bytes;
  pthread_attr_getstacksize(&attributes, &bytes);
  pthread_attr_destroy(&attributes);
  return bytes;
}

}  // namespace

std::string thread_shortage() {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  const uint64_t used = used_address_space();
  if (limit.rlim_cur != RLIM_INFINITY && used + stack_bytes() >= limit.rlim_cur) {
    return "of the address space of " + std::to_string(limit.rlim_cur / kMiB) +
           " MiB that its limit allows, " + std::to_string(used / kMiB) +
           " MiB are in use; raise the limit (ulimit -v)";
  }
  getrlimit(RLIMIT_NPROC, &limit);
  const std::string others = "pids.max of its control group, kernel.threads-max";
  if (limit.rlim_cur == RLIM_INFINITY) return "raise the limit that it has reached: " + others;
  return "its user may have " + std::to_string(limit.rlim_cur) +
         " threads; raise that limit (ulimit -u), or another: " + others;
}

std::thread start_thread(std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(),
                            "this process cannot start a thread: " + thread_shortage());
  }
}

}  // namespace hbm
