// A key-value store for ranks that are processes of one machine: a file for each key.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bootstrap/key_value.h"

namespace hbm {

class FileStore final : public bootstrap::KeyValue {
 public:
  // `directory` exists, and is the same for all processes.
  explicit FileStore(std::filesystem::path directory) : directory_(std::move(directory)) {}

  // A reader sees the old value or the new one, because the file gets its name by a rename.
  void set(const std::string& key, const std::string& value, Deadline /*deadline*/) override {
    const std::filesystem::path draft = file(key + "." + std::to_string(gettid()) + ".draft");
    std::ofstream(draft, std::ios::binary) << value;
    std::filesystem::rename(draft, file(key));
  }

  std::optional<std::string> get(const std::string& key, Deadline /*deadline*/) override {
    std::ifstream in(file(key), std::ios::binary);
    if (!in) return std::nullopt;
    return std::string(std::istreambuf_iterator<char>(in), {});
  }

  bool has(const std::vector<std::string>& keys, Deadline /*deadline*/) override {
    return std::ranges::all_of(
        keys, [this](const auto& key) { return std::filesystem::exists(file(key)); });
  }

  long add(const std::string& key, long amount, Deadline deadline) override {
    const Lock lock(directory_ / "lock");
    const long sum = std::stol(get(key, deadline).value_or("0")) + amount;
    set(key, std::to_string(sum), deadline);
    return sum;
  }

  std::string claim(const std::string& key, const std::string& value, Deadline deadline) override {
    const Lock lock(directory_ / "lock");
    if (const auto found = get(key, deadline)) return *found;
    set(key, value, deadline);
    return value;
  }

  void remove(const std::vector<std::string>& keys) noexcept override {
    std::error_code absent;
    for (const std::string& key : keys) std::filesystem::remove(file(key), absent);
  }

 private:
  // One thread of all processes holds the lock at a time. The kernel releases the lock of a dead
  // process.
  class Lock {
   public:
    explicit Lock(const std::filesystem::path& path)
        : descriptor_(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600)) {
      if (descriptor_ < 0 || flock(descriptor_, LOCK_EX) != 0) {
        throw std::system_error(errno, std::generic_category(), path);
      }
    }
    ~Lock() { close(descriptor_); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    int descriptor_;
  };

  // Returns the file of a key. A key may contain slashes. So the file's name keeps only the key's
  // letters, digits and dots, and has "_" and two hexadecimal digits for each other byte.
  std::filesystem::path file(const std::string& key) const {
    std::string name;
    for (const char c : key) {
      constexpr const char* kDigits = "0123456789abcdef";
      const auto byte = static_cast<unsigned char>(c);
      if (isalnum(byte) != 0 || c == '.') {
        name += c;
      } else {
        name += {'_', kDigits[byte / 16], kDigits[byte % 16]};
      }
    }
    return directory_ / name;
  }

  const std::filesystem::path directory_;
};

}  // namespace hbm
