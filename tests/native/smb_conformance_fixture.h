// A box and clients for the conformance tests: the guarantees of a memory box to its clients
// (docs/memory-box.md), on every transport. The same tests run over each transport in
// HBM_BOX_TRANSPORTS ("shm,tcp" by default; the virtual machine sets "verbs"), against a box on
// HBM_BOX_HOST (127.0.0.1 by default).
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

namespace hbm::box {

inline constexpr uint64_t kChunk = uint64_t{256} << 10;  // a slice; four chunks of an accumulate

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

inline client::BoxError::Cause cause_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const client::BoxError& error) {
    EXPECT_NE(std::string(error.what()), "");
    return error.cause();
  }
  ADD_FAILURE() << "nothing was thrown";
  return client::BoxError::Cause::kClosed;
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

  static ServerOptions server_options() {
    ServerOptions options;
    options.listen = {setting("HBM_BOX_HOST", "127.0.0.1") + ":0"};
    options.memory = uint64_t{256} << 20;
    options.token = "conformance";
    if (GetParam() == "verbs") options.verbs = VerbsChoice::kOn;
    return options;
  }

  std::unique_ptr<client::Client> connect(bool read_only = false) const {
    client::ClientOptions options;
    options.url = server_.url();
    options.token = "conformance";
    options.transport = client::parse_transport(GetParam());
    options.read_only = read_only;
    return std::make_unique<client::Client>(options);
  }

  Server server_;
};

}  // namespace hbm::box
