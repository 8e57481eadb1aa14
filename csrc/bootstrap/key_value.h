// A key-value store shared by the ranks: what bootstrap needs of one. The process group puts a c10d
// store behind it; tests put a map behind it.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace hbm {

class KeyValue {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  virtual ~KeyValue() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  // The value, or nothing if the key is not there now.
  virtual std::optional<std::string> get(const std::string& key) = 0;

  // Waits until all keys are there; false when the deadline came first.
  virtual bool wait(const std::vector<std::string>& keys, Deadline deadline) = 0;

  // Adds to the integer behind the key (absent: 0) and returns the sum.
  virtual long add(const std::string& key, long amount) = 0;
};

}  // namespace hbm
