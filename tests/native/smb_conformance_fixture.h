// A box and clients for the conformance tests: what a memory box promises its clients
// (docs/memory-box.md), on every transport. The same tests run over each of HBM_BOX_TRANSPORTS
// ("shm,tcp" unless it is set; the virtual machine sets "verbs"), against a box on HBM_BOX_HOST
// (127.0.0.1).
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "box/server.h"
#include "smb_client.h"

namespace hbm::client {

inline constexpr uint64_t kChunk = uint64_t{256} << 10;  // of a slice, and several of accumulate

inline std::string setting(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

inline std::vector<std::string> transports() {
  std::istringstream list(setting("HBM_BOX_TRANSPORTS", "shm,tcp"));
  std::vector<std::string> names;
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

inline std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

template <class T>
std::byte* bytes_of(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

inline BoxError::Cause cause_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const BoxError& error) {
    EXPECT_NE(std::string(error.what()), "");
    return error.cause();
  }
  ADD_FAILURE() << "nothing was thrown";
  return BoxError::Cause::kClosed;
}

inline ErrorKind kind_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()), "");
    return error.kind();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorKind::kAborted;
}

class SmbConformance : public testing::TestWithParam<std::string> {
 protected:
  SmbConformance() : server_(server_options()) {}

  static box::ServerOptions server_options() {
    box::ServerOptions options;
    options.listen = {setting("HBM_BOX_HOST", "127.0.0.1") + ":0"};
    options.memory = uint64_t{256} << 20;
    options.token = "conformance";
    if (GetParam() == "verbs") options.verbs = box::VerbsChoice::kOn;
    return options;
  }

  std::unique_ptr<Client> connect(bool read_only = false) const {
    ClientOptions options;
    options.url = server_.url();
    options.token = "conformance";
    options.transport = parse_transport(GetParam());
    options.read_only = read_only;
    return std::make_unique<Client>(options);
  }

  box::Server server_;
};

}  // namespace hbm::client
