// The log: one line a message to standard error, from any thread, without the lock of Python.
// HBMCOMM_LOG chooses the lowest level shown: error, warn (the default), info or debug.
#pragma once

#include <string>

namespace hbm::log {

enum class Level { kError, kWarn, kInfo, kDebug };

// Sets the rank that prefixes each line; -1 (the start value) leaves it out.
void set_rank(int rank) noexcept;

bool enabled(Level level) noexcept;

void write(Level level, const std::string& message) noexcept;

// For what every rank would say alike: a warning on rank 0 and outside of a job, info elsewhere.
void notice(const std::string& message) noexcept;

inline void error(const std::string& message) noexcept { write(Level::kError, message); }
inline void warn(const std::string& message) noexcept { write(Level::kWarn, message); }
inline void info(const std::string& message) noexcept { write(Level::kInfo, message); }
inline void debug(const std::string& message) noexcept { write(Level::kDebug, message); }

}  // namespace hbm::log
