#include "communicator/shm/peer_listener.h"

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/socket_files.h"
#include "bootstrap/rendezvous.h"

namespace hbm::communicator::shm {
namespace {

SocketAddress address_within_network(const std::string& name) {
  return abstract_address("hbmcomm-" + name);
}

}  // namespace

PeerListener::PeerListener()
    : name_(bootstrap::random_id()), listener_(listen_at(address_within_network(name_))) {}

void PeerListener::open_to_other_networks() {
  try {
    file_.emplace(socket_directory(), name_);
  } catch (const Error& error) {
    const char* const named = std::getenv("HBMCOMM_SOCKET_DIR");
    if (named != nullptr && *named != '\0') throw;
    log::info(std::string("ranks in other network namespaces count as another node: ") +
              error.what() + "; HBMCOMM_SOCKET_DIR may name a directory that they share");
  }
}

void PeerListener::close_to_other_networks() {
  if (!file_) return;
  take_in(file_->listener());
  file_.reset();
}

std::vector<Descriptor> PeerListener::callers() {
  take_in(listener_.get());
  if (file_) take_in(file_->listener());
  return std::exchange(callers_, {});
}

void PeerListener::take_in(int listener) {
  while (Descriptor caller = accept_at(listener)) {
    if (trusted(caller.get())) callers_.push_back(std::move(caller));
  }
}

Descriptor PeerListener::call(const bootstrap::Member& self, const bootstrap::Member& other) {
  std::error_code failure;
  Descriptor called = self.network_namespace == other.network_namespace
                          ? connect_to(address_within_network(other.listener), failure)
                          : connect_to_file(socket_directory(), other.listener, failure);
  if (failure == std::errc::resource_unavailable_try_again) {
    throw Error(ErrorKind::kUnavailable,
                "too many ranks of this node call at once: raise net.core.somaxconn above their "
                "number, or choose transport=\"mpi\"");
  }
  if (!failure && !trusted(called.get())) failure.assign(EPERM, std::generic_category());
  if (failure) {
    log::info(
        "pid " + std::to_string(other.pid) + " on " + other.host +
        " cannot be reached by a Unix socket and counts as another node: " + failure.message());
    return {};
  }
  return called;
}

}  // namespace hbm::communicator::shm
