#include "box/client/options.h"

#include <array>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "base/error.h"

namespace hbm::box::client {
namespace {

constexpr std::array kChoices = {"auto", "shm", "tcp", "verbs"};  // in the order of TransportChoice

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line) || line.empty()) return std::nullopt;
  return line;
}

}  // namespace

TransportChoice parse_transport(const std::string& name) {
  for (size_t i = 0; i < kChoices.size(); ++i) {
    if (name == kChoices[i]) return static_cast<TransportChoice>(i);
  }
  throw Error(ErrorKind::kInvalid,
              "transport must be auto, shm, tcp or verbs, not \"" + name + '"');
}

const char* transport_name(TransportChoice choice) noexcept {
  return kChoices[static_cast<size_t>(choice)];
}

const char* transport_name(protocol::TransportKind transport) noexcept {
  switch (transport) {
    case protocol::TransportKind::kShm:
      return "shm";
    case protocol::TransportKind::kTcp:
      return "tcp";
    case protocol::TransportKind::kVerbs:
      return "verbs";
  }
  return "unknown";
}

std::string token_from_environment() {
  if (const std::string token = variable("HBMCOMM_TOKEN"); !token.empty()) return token;
  if (const std::string path = variable("HBMCOMM_TOKEN_FILE"); !path.empty()) {
    if (auto token = first_line(path)) return *token;
    throw Error(ErrorKind::kInvalid, "HBMCOMM_TOKEN_FILE=" + path +
                                         " has no token: it cannot be read, or its first line is "
                                         "empty");
  }
  const std::string home = variable("HOME");
  return first_line(home + "/.config/hbmcomm/token").value_or("");
}

ClientOptions options_from_environment() {
  ClientOptions options;
  options.url = variable("HBMCOMM_BOX");
  if (options.url.empty()) {
    throw Error(ErrorKind::kInvalid,
                "HBMCOMM_BOX is not set: it names the box, as in smb://host:port");
  }
  if (const std::string name = variable("HBMCOMM_BOX_TRANSPORT"); !name.empty()) {
    options.transport = parse_transport(name);
  }
  if (const std::string seal = variable("HBMCOMM_BOX_SEAL"); !seal.empty()) {
    if (seal != "0" && seal != "1") {
      throw Error(ErrorKind::kInvalid, "HBMCOMM_BOX_SEAL is 0 or 1, not \"" + seal + '"');
    }
    options.seal = seal == "1";
  }
  options.token = token_from_environment();
  return options;
}

}  // namespace hbm::box::client
