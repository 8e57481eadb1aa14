#include "box/server/listener/handshake.h"

#include <cstring>

#include "base/error.h"
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

void require_sendable(const ListenerIdentity& welcome) {
  require_room("the boot id", welcome.boot_id, sizeof(smb::Joined::boot_id));
  require_room("the path of the Unix socket", welcome.socket_path,
               sizeof(smb::Joined::socket_path));
}

Handshake::Handshake(RequestHandler& handler, const ListenerIdentity& welcome)
    : handler_(handler), welcome_(welcome) {
  hello_.nonce = smb::random_nonce();
  hello_.token_required = welcome.token.empty() ? 0 : 1;
}

Handshake::Outcome Handshake::join(const smb::Join& join, smb::TransportKind transport) {
  Outcome outcome;
  if (!welcome_.token.empty() &&
      !smb::equal(join.proof, smb::client_proof(welcome_.token, hello_, join))) {
    outcome.status = smb::Status::kDenied;
    outcome.cause = join.proof == smb::Proof{} ? "the box asks for a token, and the client has none"
                                               : "the client's token is not the box's";
    return outcome;
  }
  Joining joining = handler_.join(join, transport);
  outcome.status = joining.status;
  outcome.cause = std::move(joining.cause);
  if (!joining.session) return outcome;
  outcome.joined.session = joining.id;
  outcome.joined.box = handler_.contents();
  outcome.joined.applied = joining.applied;
  outcome.joined.lease_ms = handler_.lease_ms();
  outcome.joined.verbs_port = welcome_.verbs_port;
  outcome.joined.resumed = joining.resumed ? 1 : 0;
  copy_text(outcome.joined.boot_id, welcome_.boot_id);
  copy_text(outcome.joined.socket_path, welcome_.socket_path);
  outcome.joined.proof = smb::server_proof(welcome_.token, hello_, join, outcome.joined);
  outcome.session = std::move(joining.session);
  return outcome;
}

}  // namespace hbm::box
