#include "box/server.h"

#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <thread>
#include <utility>

#include "base/boot_id.h"
#include "base/error.h"
#include "base/log.h"
#include "box/protocol/address.h"
#include "box/server/listener/stream_listener.h"
#include "box/server/service.h"
#include "box/server/storage/store.h"
#include "box/server/tuning.h"
#include "box/server_options.h"
#include "box/verbs/common/load_library.h"
#include "box/verbs/server/library.h"
#include "memory/control_group.h"

namespace hbm::box {
namespace {

// Returns the result of `open`; adds the name of the part to its error.
template <class Open>
auto part(const char* name, Open&& open) {
  try {
    return open();
  } catch (const Error& error) {
    throw Error(error.kind(),
                std::string("the memory box cannot start: its ") + name + ": " + error.what());
  }
}

// Returns true if the box has no store, or a store on tmpfs. In both cases the kernel cannot write
// segment pages back, so they stay charged to the control group.
bool stays_in_memory(const std::string& store) {
  if (store.empty()) return true;
  std::filesystem::path there = std::filesystem::absolute(store);
  while (there.has_relative_path() && !std::filesystem::exists(there)) there = there.parent_path();
  struct statfs system{};
  return statfs(there.c_str(), &system) == 0 && system.f_type == TMPFS_MAGIC;
}

// Checks options.memory against the memory limit of the control group, because the kernel kills the
// box if clients write more than the limit.
void require_memory(const ServerOptions& options) {
  const memory::GroupLimit limit = memory::group_limit();
  if (!stays_in_memory(options.store)) return;
  const std::string asked = std::to_string(options.memory) + " bytes for segments were asked for";
  if (options.memory > limit.bytes) {
    throw Error(ErrorKind::kExhausted,
                asked + ", and this process' control group may have " +
                    std::to_string(limit.bytes) + " (" + limit.file +
                    "): ask for less, or raise the container's or job's memory limit");
  }
  if (options.memory > limit.room) {
    log::info("memory box: " + asked + ", and of the " + std::to_string(limit.bytes) +
              " that this process' control groups may have (" + limit.file + ") " +
              std::to_string(limit.room) + " are left: the kernel kills when they are used up");
  }
}

uint32_t threads(uint32_t asked, uint32_t most) {
  return asked != 0 ? asked : std::clamp(std::thread::hardware_concurrency(), 2u, most);
}

// Replaces a host that means all addresses by the name of this machine, which clients on other
// machines can use.
protocol::Address reachable(protocol::Address address) {
  constexpr std::array everywhere{"", "0.0.0.0", "::"};
  if (std::find(everywhere.begin(), everywhere.end(), address.host) == everywhere.end()) {
    return address;
  }
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) {
    throw Error(ErrorKind::kUnavailable, "this machine has no name that clients could use");
  }
  address.host = host.data();
  return address;
}

// Returns no listener for kOff. If this host cannot serve verbs, kAuto logs the reason and returns
// no listener, and kOn throws.
verbs::server::OpenedListener open_verbs(server::RequestHandler& handler,
                                         const ServerOptions& options) {
  if (options.verbs == VerbsChoice::kOff) return {};
  const bool automatic = options.verbs == VerbsChoice::kAuto;
  const std::string cause = automatic ? why_no_verbs() : "";
  if (!cause.empty()) {
    log::info("memory box: no verbs: " + cause);
    return {};
  }
  verbs::server::VerbsListenerOptions listening;
  listening.host = options.verbs_host;
  listening.port = options.verbs_port;
  listening.token = options.token;
  listening.seal = options.seal;
  listening.max_clients = options.most_clients;
  try {
    verbs::server::OpenedListener opened =
        verbs::common::load<verbs::server::ServerLibrary>().listen(handler, listening);
    log::info("memory box: verbs at port " + std::to_string(opened.port));
    return opened;
  } catch (const Error& error) {
    if (!automatic) throw;
    log::warn(std::string("memory box: no verbs, although there is an RDMA device: ") +
              error.what());
    return {};
  }
}

}  // namespace

std::string why_no_verbs() {
  try {
    return verbs::common::load<verbs::server::ServerLibrary>().why_not();
  } catch (const Error& error) {
    return error.what();
  }
}

// The parts of a box. Each uses only the parts before it, so the last is destroyed first.
struct Server::Parts {
  std::shared_ptr<memory::Pool> pool;
  std::unique_ptr<server::storage::Store> store;
  std::unique_ptr<server::Service> service;
  std::unique_ptr<server::Listener> verbs;
  std::unique_ptr<server::listener::StreamListener> streams;

  explicit Parts(const ServerOptions& options, const std::vector<protocol::Address>& listen,
                 const std::string& socket_path);
  void end() noexcept;

  void drain(std::chrono::milliseconds most);

 private:
  void serve(const server::ServiceOptions& serving, const ServerOptions& options,
             const std::vector<protocol::Address>& listen, const std::string& socket_path);
};

Server::Parts::Parts(const ServerOptions& options, const std::vector<protocol::Address>& listen,
                     const std::string& socket_path) {
  server::ServiceOptions serving;
  serving.lease = options.lease;
  serving.most_clients = options.most_clients;
  serving.handlers = threads(options.handlers, server::kMostHandlersByDefault);
  serving.accumulate_threads = threads(options.accumulate_threads, server::kMostHandlersByDefault);

  pool = part("memory pool", [&] {
    require_memory(options);
    return memory::Pool::create({.policy = options.policy,
                                 .capacity = options.memory,
                                 .smallest_block = options.smallest_block,
                                 .largest_block = options.largest_block});
  });
  store = part("store", [&] {
    server::storage::StoreOptions opening{
        .directory = options.store, .sync = options.sync, .records = {}};
    opening.records.sessions = options.most_clients;
    opening.records.operations = serving.handlers;
    opening.records.parts = serving.accumulate_threads;
    return server::storage::Store::open(opening, pool);
  });
  try {
    serve(serving, options, listen, socket_path);
  } catch (...) {
    end();
    throw;
  }
}

void Server::Parts::serve(const server::ServiceOptions& serving, const ServerOptions& options,
                          const std::vector<protocol::Address>& listen,
                          const std::string& socket_path) {
  service = std::make_unique<server::Service>(serving, *store, *pool);

  auto opened = part("verbs listener", [&] { return open_verbs(*service, options); });
  verbs = std::move(opened.listener);
  streams = part("listener", [&] {
    server::listener::StreamListenerOptions listening;
    listening.listen = listen;
    listening.socket_path = socket_path;
    listening.token = options.token;
    listening.seal = options.seal;
    listening.boot_id = boot_id();
    listening.verbs_port = opened.port;
    listening.threads = threads(options.receivers, server::kMostReceiversByDefault);
    return std::make_unique<server::listener::StreamListener>(*service, listening);
  });
}

// Destroys the users of segments before it closes the store.
void Server::Parts::end() noexcept {
  if (service) service->close();
  streams.reset();
  verbs.reset();
  service.reset();
  store->close();
}

void Server::Parts::drain(std::chrono::milliseconds most) {
  const auto until = server::Clock::now() + most;
  for (server::Listener* listener : {static_cast<server::Listener*>(streams.get()), verbs.get()}) {
    if (listener == nullptr) continue;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(until - server::Clock::now()).count();
    listener->drain(static_cast<uint32_t>(std::clamp<int64_t>(left, 0, UINT32_MAX)));
  }
}

Server::Server(const ServerOptions& options) {
  const std::vector<protocol::Address> listen = check(options);
  protocol::Address local;
  if (options.unix_socket) {
    local.path = options.socket_path.empty() ? new_socket_path() : options.socket_path;
  }
  parts_ = std::make_unique<Parts>(options, listen, local.path);
  for (const protocol::Address& address : parts_->streams->addresses()) {
    urls_.push_back(reachable(address).url());
  }
  if (local.is_unix()) urls_.push_back(local.url());
  for (const std::string& url : urls_) log::info("memory box: listens at " + url);
}

Server::~Server() { close(); }

ServerStats Server::stats() const {
  const std::shared_lock lock(mutex_);
  if (parts_ == nullptr) throw Error(ErrorKind::kUnavailable, "the memory box is closed");
  return {parts_->service->statistics(), parts_->pool->stats()};
}

void Server::drain(std::chrono::milliseconds most) {
  const std::shared_lock lock(mutex_);
  if (parts_ != nullptr) parts_->drain(most);
}

void Server::close() {
  if (fork_.in_child()) {
    static_cast<void>(parts_.release());  // the threads, and their resources, belong to the parent
    return;
  }
  const std::unique_lock lock(mutex_);
  if (parts_ == nullptr) return;
  parts_->drain(server::kCloseDrainTimeout);
  parts_->end();
  parts_.reset();
}

bool Server::closed() const {
  const std::shared_lock lock(mutex_);
  return parts_ == nullptr;
}

}  // namespace hbm::box
