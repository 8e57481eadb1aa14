#include "process_group/handle_store.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/tcp.h"
#include "base/threads.h"

namespace hbm::process_group {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr const char* kIdKey = "hbm/handle";  // under it is the id of the store's handle
constexpr const char* kLoopback = "127.0.0.1";

milliseconds left_until(bootstrap::KeyValue::Deadline deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
  return std::max(left, milliseconds(1));
}

// Returns the addresses at which this process can reach the handle's store. 127.0.0.1 leads there
// only within one network. In one network every other address leads to the same store.
std::vector<std::string> ways_to(const bootstrap::Handle& handle) {
  if (handle.network == bootstrap::network_id()) return {kLoopback};
  std::vector<std::string> ways;
  for (const std::string& address : handle.addresses) {
    if (!address.starts_with("127.")) ways.push_back(address);
  }
  return ways;
}

// Returns why no connection to the address can be made; empty if one can. PyTorch's own client
// would print warnings and repeat the attempt until its timeout.
std::string obstacle(const std::string& address, int port, bootstrap::KeyValue::Deadline deadline) {
  const Descriptor probe = start_to_connect(address, static_cast<uint16_t>(port));
  if (!probe) return std::strerror(errno);
  pollfd connected{probe.get(), POLLOUT, 0};
  const int left = static_cast<int>(left_until(deadline).count());
  const int error = poll(&connected, 1, left) == 1 ? connection_error(probe.get()) : ETIMEDOUT;
  return error == 0 ? std::string() : std::strerror(error);
}

c10d::TCPStoreOptions options(int port, bool serves, milliseconds timeout) {
  c10d::TCPStoreOptions made;
  made.port = static_cast<uint16_t>(port);
  made.isServer = serves;
  made.waitWorkers = false;
  made.timeout = timeout;
  return made;
}

// An attempt to open a store. A thread that the caller may abandon makes it.
struct Opening {
  c10::intrusive_ptr<c10d::Store> store;
  std::string failures;
};

void open(const bootstrap::Handle& handle, bootstrap::KeyValue::Deadline deadline, Opening& made) {
  for (const std::string& address : ways_to(handle)) {
    std::string failure = obstacle(address, handle.port, deadline);
    if (failure.empty()) {
      c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::TCPStore>(
          address, options(handle.port, /*serves=*/false, left_until(deadline)));
      if (store->check({kIdKey}) && store->get_to_str(kIdKey) == handle.id) {
        made.store = std::move(store);
        return;
      }
      failure = "another program answers there";
    }
    made.failures += (made.failures.empty() ? "" : "; ") + address + ":" +
                     std::to_string(handle.port) + ": " + failure;
  }
}

}  // namespace

HandleStore::HandleStore() {
  try {
    const auto served = c10::make_intrusive<c10d::TCPStore>(
        kLoopback, options(0, /*serves=*/true, c10d::Store::kDefaultTimeout));
    handle_ = bootstrap::make_handle(served->getPort());
    store_ = served;
    store_->set(kIdKey, handle_.id);
  } catch (const c10::Error& error) {
    throw Error(ErrorKind::kUnavailable,
                std::string("this process cannot serve a store for its handle: ") +
                    error.what_without_backtrace());
  }
}

c10::intrusive_ptr<c10d::Store> open_store(const bootstrap::Handle& handle, const std::string& what,
                                           bootstrap::KeyValue::Deadline deadline) {
  const std::string first = "rank 0 (" + process_name(handle.process) + ")";
  const auto require_alive = [&] {
    if (has_ended(handle.process)) throw Error(ErrorKind::kDeath, what + first + " has died");
  };
  require_alive();
  const auto made = std::make_shared<Opening>();
  bool returned = false;
  try {
    returned = run_abandonable([handle, deadline, made] { open(handle, deadline, *made); },
                               deadline, require_alive);
  } catch (const c10::Error& error) {
    require_alive();
    throw Error(ErrorKind::kNetwork, what + first +
                                         " serves the store in which the members meet, "
                                         "and the connection failed: " +
                                         error.what_without_backtrace());
  }
  if (returned && made->store) return std::move(made->store);
  require_alive();
  if (!returned) {
    throw Error(ErrorKind::kTimeout,
                what + first +
                    " serves the store in which the members meet, and did not "
                    "answer before the timeout: it is stopped, or unreachable");
  }
  throw Error(ErrorKind::kNetwork,
              what + first +
                  " serves the store in which the members meet, and cannot be reached (" +
                  made->failures + "): it has died, or a firewall is between the machines");
}

}  // namespace hbm::process_group
