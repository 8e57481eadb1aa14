#include "box/server/listener/admission.h"

#include <cstring>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "box/protocol/proof.h"

namespace hbm::box {
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
  require_room("the boot id", identity.boot_id, sizeof(smb::Joined::boot_id));
  require_room("the path of the Unix socket", identity.socket_path,
               sizeof(smb::Joined::socket_path));
}

Handshake::Handshake(RequestHandler& handler, const ListenerIdentity& identity,
                     smb::TransportKind transport)
    : handler_(handler), identity_(identity), transport_(transport) {
  hello_.nonce = smb::random_nonce();
  hello_.token_required = identity.token.empty() ? 0 : 1;
  const bool sealed = identity.seal && transport == smb::TransportKind::kTcp;
  hello_.sealed = sealed ? hello_.token_required : 0;
}

Handshake::Admission Handshake::join(const smb::Join& join) {
  Admission admission;
  if (!identity_.token.empty() &&
      !smb::equal(join.proof, smb::client_proof(identity_.token, hello_, join))) {
    admission.status = smb::Status::kDenied;
    admission.cause = join.proof == smb::Proof{}
                          ? "the box asks for a token, and the client has none"
                          : "the client's token is not the box's";
    return admission;
  }
  const bool seals = (join.flags & smb::Join::kSealed) != 0;
  if (seals != (hello_.sealed != 0)) {
    admission.status = smb::Status::kUnsupported;
    admission.cause = smb::seal_mismatch(seals);
    return admission;
  }
  smb::Join asked = join;
  asked.flags &= ~smb::Join::kSealed;  // the connection's, not the session's
  Joining joining = handler_.join(asked, transport_);
  admission.status = joining.status;
  admission.cause = std::move(joining.cause);
  if (!joining.session) return admission;
  admission.joined.session = joining.id;
  admission.joined.box = handler_.contents();
  admission.joined.applied = joining.applied;
  admission.joined.lease_ms = handler_.lease_ms();
  admission.joined.verbs_port = identity_.verbs_port;
  admission.joined.resumed = joining.resumed ? 1 : 0;
  copy_text(admission.joined.boot_id, identity_.boot_id);
  copy_text(admission.joined.socket_path, identity_.socket_path);
  admission.joined.proof = smb::server_proof(identity_.token, hello_, join, admission.joined);
  if (seals) admission.seal = smb::seal_keys(identity_.token, hello_, join);
  admission.session = std::move(joining.session);
  return admission;
}

void PendingConnections::enter(const std::shared_ptr<JoiningConnection>& connection) {
  std::shared_ptr<JoiningConnection> oldest;
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() >= most_) oldest = take_oldest();
    waiting_.push_back({connection.get(), connection, Clock::now() + longest_});
    places_[connection.get()] = std::prev(waiting_.end());
  }
  if (oldest) oldest->dismiss("too many others came before it had joined");
}

void PendingConnections::leave(const JoiningConnection& connection) {
  const std::lock_guard lock(mutex_);
  const auto place = places_.find(&connection);
  if (place == places_.end()) return;
  waiting_.erase(place->second);
  places_.erase(place);
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
    std::shared_ptr<JoiningConnection> late;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty()) return -1;
      const auto left = waiting_.front().until - Clock::now();
      if (left > Clock::duration::zero()) {
        return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
      }
      late = take_oldest();
    }
    if (late) late->dismiss("it did not join in time");
  }
}

std::shared_ptr<PendingConnections::JoiningConnection> PendingConnections::take_oldest() {
  while (!waiting_.empty()) {
    std::shared_ptr<JoiningConnection> oldest = waiting_.front().connection.lock();
    places_.erase(waiting_.front().key);
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

}  // namespace hbm::box
