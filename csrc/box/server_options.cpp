#include "box/server_options.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/socket_files.h"
#include "box/protocol/proof.h"
#include "box/server/tuning.h"

namespace hbm::box {
namespace {

[[noreturn]] void refuse(const std::string& cause) {
  throw Error(ErrorKind::kInvalid, "a memory box's options: " + cause);
}

void check_threads(const char* name, uint32_t threads) {
  if (threads > server::kMostThreadsOfAKind) {
    refuse(std::string(name) + " is " + std::to_string(threads) + "; it may be at most " +
           std::to_string(server::kMostThreadsOfAKind));
  }
}

void check_socket(const ServerOptions& options) {
  const std::string& path = options.socket_path;
  if (path.empty()) return;
  if (!options.unix_socket) refuse("there is a path of a Unix socket, and no Unix socket");
  if (path.front() != '/' || path.find('\0') != std::string::npos) {
    refuse("the path of the Unix socket, \"" + path + "\", is not an absolute one");
  }
  constexpr size_t most = sizeof(sockaddr_un::sun_path) - 1;
  if (path.size() > most) {
    refuse("the path of the Unix socket, \"" + path + "\", has " + std::to_string(path.size()) +
           " bytes, and the system takes " + std::to_string(most));
  }
}

void check_store(const ServerOptions& options) {
  if (options.store.empty()) {
    if (options.sync) refuse("sync is about the store, and there is none: name its directory");
    return;
  }
  if (options.policy == memory::Policy::kBind || options.policy == memory::Policy::kInterleave) {
    throw Error(ErrorKind::kUnsupported,
                std::string("a memory box with a store has its segments in files, which the policy "
                            "\"") +
                    memory::policy_name(options.policy) +
                    "\" cannot place: use \"preferred\" or \"ddr\"");
  }
}

constexpr const char* kPrefix = "hbmcomm-box-";
constexpr const char* kSuffix = ".socket";

// Returns true if a killed box left the file. A box that has not called listen() yet has such a
// file too, so the file must also be older than a minute (past_start()).
bool abandoned(const std::filesystem::path& file) {
  const std::string name = file.filename();
  return name.starts_with(kPrefix) && name.ends_with(kSuffix) && past_start(file) &&
         refuses_calls(file, SOCK_STREAM);
}

}  // namespace

VerbsChoice parse_verbs(const std::string& name) {
  if (name == "off") return VerbsChoice::kOff;
  if (name == "auto") return VerbsChoice::kAuto;
  if (name == "on") return VerbsChoice::kOn;
  throw Error(ErrorKind::kInvalid, "verbs is \"" + name + "\"; it may be off, auto or on");
}

std::vector<protocol::Address> check(const ServerOptions& options) {
  if (options.memory == 0) refuse("memory is 0; say how many bytes the box may hand out");
  if (options.lease < server::kShortestLease || options.lease > server::kLongestLease) {
    refuse("lease is " + std::to_string(options.lease.count()) +
           " ms; it may be between 100 ms and a week");
  }
  if (options.most_clients == 0 || options.most_clients > server::kMostClients) {
    refuse("most_clients is " + std::to_string(options.most_clients) +
           "; it may be between 1 and " + std::to_string(server::kMostClients));
  }
  check_threads("handlers", options.handlers);
  check_threads("accumulate_threads", options.accumulate_threads);
  check_threads("receivers", options.receivers);
  check_socket(options);
  check_store(options);

  std::vector<protocol::Address> addresses;
  for (const std::string& listen : options.listen) {
    addresses.push_back(protocol::parse_host_and_port(listen));
  }
  if (addresses.empty() && !options.unix_socket) {
    refuse("there is nothing to listen on, neither TCP nor a Unix socket");
  }
  return addresses;
}

std::string new_socket_path() {
  const std::string where = socket_directory();
  sweep_sockets(where, abandoned);
  std::array<char, 17> random;
  std::snprintf(random.data(), random.size(), "%016" PRIx64, protocol::random_id().low);
  return where + "/" + kPrefix + std::to_string(getpid()) + "-" + random.data() + kSuffix;
}

}  // namespace hbm::box
