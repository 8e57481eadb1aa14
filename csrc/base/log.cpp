#include "base/log.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hbm::log {
namespace {

constexpr std::array<const char*, 4> kNames = {"error", "warn", "info", "debug"};

Level level_from_environment() noexcept {
  const char* value = std::getenv("HBMCOMM_LOG");
  if (value == nullptr || *value == '\0') return Level::kWarn;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (std::strcmp(value, kNames[i]) == 0) return static_cast<Level>(i);
  }
  const char* rank = std::getenv("RANK");
  if (rank == nullptr || *rank == '\0' || std::strcmp(rank, "0") == 0) {  // one line for each job
    std::fprintf(stderr,
                 "[hbm] warn: HBMCOMM_LOG=%s is not error, warn, info or debug; using warn\n",
                 value);
  }
  return Level::kWarn;
}

std::atomic<int> rank_prefix{-1};

}  // namespace

void set_rank(int rank) noexcept { rank_prefix.store(rank, std::memory_order_relaxed); }
int rank() noexcept { return rank_prefix.load(std::memory_order_relaxed); }

bool enabled(Level level) noexcept {
  static const Level shown = level_from_environment();
  return level <= shown;
}

void write(Level level, const std::string& message) noexcept {
  if (!enabled(level)) return;
  const char* name = kNames[static_cast<size_t>(level)];
  const int rank = rank_prefix.load(std::memory_order_relaxed);
  if (rank < 0) {
    std::fprintf(stderr, "[hbm] %s: %s\n", name, message.c_str());
  } else {
    std::fprintf(stderr, "[hbm rank %d] %s: %s\n", rank, name, message.c_str());
  }
}

void notice(const std::string& message) noexcept {
  const bool speaks_for_all = rank_prefix.load(std::memory_order_relaxed) <= 0;
  write(speaks_for_all ? Level::kWarn : Level::kInfo, message);
}

}  // namespace hbm::log
