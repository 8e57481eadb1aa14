#include "box/server/listener/admission.h"

#include <cstring>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "box/protocol/proof.h"

namespace hbm::box::server::listener {
namespace {

template <size_t kBytes>
void copy_text(char (&to)[kBytes], const std::string& text) {
  std::memcpy(to, text.c_str(), text.size() + 1);
}

void require_room(const char* what, const std::string& text, size_t room) {
  if (text.size() < room) return;
  throw Error(ErrorKind::kInvalid, std::string(what) + " \"" + text + "\" has " +
                                       std::to_string(text.size()) + " bytes; at most " +
                                       std::to_string(room - 1) + " fit");
}

}  // namespace

void require_sendable(const ListenerIdentity& identity) {
  require_room("the boot id", identity.boot_id, sizeof(protocol::Joined::boot_id));
  require_room("the path of the Unix socket", identity.socket_path,
               sizeof(protocol::Joined::socket_path));
}

Handshake::Handshake(RequestHandler& handler, const ListenerIdentity& identity,
                     protocol::TransportKind transport)
    : handler_(handler), identity_(identity), transport_(transport) {
  hello_.nonce = protocol::random_nonce();
  hello_.token_required = identity.token.empty() ? 0 : 1;
  const bool authenticated = identity.seal && transport == protocol::TransportKind::kTcp;
  hello_.authenticated = authenticated ? hello_.token_required : 0;
}

Handshake::Admission Handshake::join(const protocol::Join& join, const std::string& host) {
  Admission admission;
  if (!identity_.token.empty() &&
      !protocol::equal(join.proof, protocol::client_proof(identity_.token, hello_, join))) {
    admission.status = protocol::Status::kDenied;
    admission.cause = join.proof == protocol::Proof{}
                          ? "the box asks for a token, and the client has none"
                          : "the client's token is not the box's";
    return admission;
  }
  const bool authenticates = (join.flags & protocol::Join::kAuthenticated) != 0;
  if (authenticates != (hello_.authenticated != 0)) {
    admission.status = protocol::Status::kUnsupported;
    admission.cause = protocol::authentication_mismatch(authenticates);
    return admission;
  }
  protocol::Join asked = join;
  asked.flags &=
      ~protocol::Join::kAuthenticated;  // a property of the connection, not of the session
  Joining joining = handler_.join(asked, transport_, host);
  admission.status = joining.status;
  admission.cause = std::move(joining.cause);
  if (!joining.session) return admission;
  admission.joined.session = joining.id;
  admission.joined.generation = handler_.generation();
  admission.joined.applied = joining.applied;
  admission.joined.lease_ms = handler_.lease_ms();
  admission.joined.verbs_port = identity_.verbs_port;
  admission.joined.resumed = joining.resumed ? 1 : 0;
  copy_text(admission.joined.boot_id, identity_.boot_id);
  copy_text(admission.joined.socket_path, identity_.socket_path);
  admission.joined.proof = protocol::server_proof(identity_.token, hello_, join, admission.joined);
  if (authenticates) admission.keys = protocol::mac_keys(identity_.token, hello_, join);
  admission.session = std::move(joining.session);
  return admission;
}

void PendingConnections::enter(const std::shared_ptr<JoiningConnection>& connection) {
  std::shared_ptr<JoiningConnection> oldest;
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() >= most_) oldest = take_oldest();
    waiting_.push_back({connection.get(), connection, Clock::now() + longest_});
    entries_[connection.get()] = std::prev(waiting_.end());
  }
  if (oldest) oldest->dismiss("too many other clients connected before it had joined");
}

void PendingConnections::leave(const JoiningConnection& connection) {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(&connection);
  if (entry == entries_.end()) return;
  waiting_.erase(entry->second);
  entries_.erase(entry);
}

bool PendingConnections::dismiss_oldest(const char* cause) {
  std::shared_ptr<JoiningConnection> oldest;
  {
    const std::lock_guard lock(mutex_);
    oldest = take_oldest();
  }
  if (oldest) oldest->dismiss(cause);
  return oldest != nullptr;
}

int PendingConnections::sweep() {
  for (;;) {
    std::shared_ptr<JoiningConnection> overdue;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty()) return -1;
      const auto left = waiting_.front().until - Clock::now();
      if (left > Clock::duration::zero()) {
        return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
      }
      overdue = take_oldest();
    }
    if (overdue) overdue->dismiss("it did not join in time");
  }
}

std::shared_ptr<PendingConnections::JoiningConnection> PendingConnections::take_oldest() {
  while (!waiting_.empty()) {
    std::shared_ptr<JoiningConnection> oldest = waiting_.front().connection.lock();
    entries_.erase(waiting_.front().key);
    waiting_.pop_front();
    if (oldest) return oldest;
  }
  return nullptr;
}

void LogLimiter::warn(const std::string& message) {
  uint64_t withheld = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    if (now >= until_) {
      until_ = now + interval_;
      written_ = 0;
      withheld = std::exchange(withheld_, 0);
    }
    if (written_ == most_) {
      ++withheld_;
      return;
    }
    ++written_;
  }
  log::warn(withheld == 0 ? message
                          : message + " (and " + std::to_string(withheld) +
                                " more warnings of this sort were left out)");
}

}  // namespace hbm::box::server::listener
