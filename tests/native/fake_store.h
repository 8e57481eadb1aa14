// A key-value store for ranks that are threads of one process.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/key_value.h"

namespace hbm {

class FakeStore final : public KeyValue {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }

  std::optional<std::string> get(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    const auto place = values_.find(key);
    if (place == values_.end()) return std::nullopt;
    return place->second;
  }

  bool wait(const std::vector<std::string>& keys, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] {
      for (const std::string& key : keys) {
        if (!values_.contains(key)) return false;
      }
      return true;
    });
  }

  long add(const std::string& key, long amount) override {
    const std::lock_guard lock(mutex_);
    std::string& value = values_.try_emplace(key, "0").first->second;
    const long sum = std::stol(value) + amount;
    value = std::to_string(sum);
    changed_.notify_all();
    return sum;
  }

 private:
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace hbm
