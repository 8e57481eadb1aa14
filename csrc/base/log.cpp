#include "base/log.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hbm::log {
namespace {

constexpr std::array<const char*, 4> kNames = {"error", "warn", "info", "debug"};

// Prints a line with the present time in UTC. The calendar of std::chrono takes no lock, in
// contrast to gmtime_r(), whose lock another thread may hold when a child is forked.
void print(Level level, int rank, const std::string& message) noexcept {
  using namespace std::chrono;
  const auto now = floor<milliseconds>(system_clock::now());
  const auto midnight = floor<days>(now);
  const year_month_day date(midnight);
  const hh_mm_ss time(now - midnight);
  std::array<char, 24> name{"hbm"};
  if (rank >= 0) std::snprintf(name.data(), name.size(), "hbm rank %d", rank);
  std::fprintf(stderr, "%04d-%02u-%02uT%02d:%02d:%02d.%03dZ [%s] %s: %s\n",
               static_cast<int>(date.year()), static_cast<unsigned>(date.month()),
               static_cast<unsigned>(date.day()), static_cast<int>(time.hours().count()),
               static_cast<int>(time.minutes().count()), static_cast<int>(time.seconds().count()),
               static_cast<int>(time.subseconds().count()), name.data(),
               kNames[static_cast<size_t>(level)], message.c_str());
}

Level level_from_environment() noexcept {
  const char* value = std::getenv("HBMCOMM_LOG");
  if (value == nullptr || *value == '\0') return Level::kWarn;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (std::strcmp(value, kNames[i]) == 0) return static_cast<Level>(i);
  }
  const char* rank = std::getenv("RANK");
  if (rank == nullptr || *rank == '\0' || std::strcmp(rank, "0") == 0) {  // one line for each job
    print(Level::kWarn, -1,
          std::string("HBMCOMM_LOG=") + value + " is not error, warn, info or debug; using warn");
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
  if (enabled(level)) print(level, rank(), message);
}

void notice(const std::string& message) noexcept {
  const bool speaks_for_all = rank_prefix.load(std::memory_order_relaxed) <= 0;
  write(speaks_for_all ? Level::kWarn : Level::kInfo, message);
}

}  // namespace hbm::log
