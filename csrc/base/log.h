// The log: writes one line for each message to standard error, from any thread, without Python's
// lock. A line has the time in UTC (ISO 8601, milliseconds), the rank and the level, as in
// "2026-11-29T14:50:45.123Z [hbm rank 0] warn: ...".
// HBMCOMM_LOG chooses the lowest level shown: error, warn (the default), info or debug.
#pragma once

#include <string>

namespace hbm::log {

enum class Level { kError, kWarn, kInfo, kDebug };

// Sets the rank that each line has; -1 (the initial value) omits it.
void set_rank(int rank) noexcept;
int rank() noexcept;

bool enabled(Level level) noexcept;

void write(Level level, const std::string& message) noexcept;

// Logs a message that is the same on every rank. The level is warn on rank 0 and in a process
// without a rank, and info on other ranks.
void notice(const std::string& message) noexcept;

inline void error(const std::string& message) noexcept { write(Level::kError, message); }
inline void warn(const std::string& message) noexcept { write(Level::kWarn, message); }
inline void info(const std::string& message) noexcept { write(Level::kInfo, message); }
inline void debug(const std::string& message) noexcept { write(Level::kDebug, message); }

}  // namespace hbm::log
