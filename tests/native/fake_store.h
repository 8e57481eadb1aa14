// A key-value store for ranks that are threads of one process.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/key_value.h"

namespace hbm {

class FakeStore final : public bootstrap::KeyValue {
 public:
  void set(const std::string& key, const std::string& value, Deadline /*deadline*/) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
  }

  std::optional<std::string> get(const std::string& key, Deadline /*deadline*/) override {
    const std::lock_guard lock(mutex_);
    const auto place = values_.find(key);
    if (place == values_.end()) return std::nullopt;
    return place->second;
  }

  bool has(const std::vector<std::string>& keys, Deadline /*deadline*/) override {
    const std::lock_guard lock(mutex_);
    return std::ranges::all_of(keys, [this](const auto& key) { return values_.contains(key); });
  }

  std::vector<std::string> keys() {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> all;
    for (const auto& [key, value] : values_) all.push_back(key);
    return all;
  }

  long add(const std::string& key, long amount, Deadline /*deadline*/) override {
    const std::lock_guard lock(mutex_);
    std::string& value = values_.try_emplace(key, "0").first->second;
    const long sum = std::stol(value) + amount;
    value = std::to_string(sum);
    return sum;
  }

  std::string claim(const std::string& key, const std::string& value,
                    Deadline /*deadline*/) override {
    const std::lock_guard lock(mutex_);
    return values_.try_emplace(key, value).first->second;
  }

  void remove(const std::vector<std::string>& keys) noexcept override {
    const std::lock_guard lock(mutex_);
    for (const std::string& key : keys) values_.erase(key);
  }

 private:
  std::mutex mutex_;  // guards all below
  std::map<std::string, std::string> values_;
};

}  // namespace hbm
