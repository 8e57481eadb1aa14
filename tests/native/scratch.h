// A directory for files and sockets of a test.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <stdexcept>
#include <string>

namespace hbm {

// A directory that the destructor removes. Tests with sockets pass "/tmp" as `where`, because the
// path of a socket must be short.
class Scratch {
 public:
  explicit Scratch(const std::filesystem::path& where = std::filesystem::temp_directory_path()) {
    std::string name = where / "hbm_store_XXXXXX";
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~Scratch() { std::filesystem::remove_all(path_); }

  std::string operator/(const std::string& name) const { return path_ / name; }
  std::string store() const { return path_ / "store"; }

 private:
  std::filesystem::path path_;
};

}  // namespace hbm
