// A libFuzzer target: one end of an RDMA connection sends arbitrary bytes to the other end, without
// a device.
//
// The first byte of the input selects the mode. Bits 0 and 1 select the bytes and their receiver:
//
//   0   connection requests to a box
//   1   the private data of a box's reply, to a client
//   2   messages to a box
//   3   messages to a client with one request of each kind in flight
//
// Bit 2: there is a token, so requests need a proof, and messages need tags. Bit 3: the proofs and
// tags are correct. The rest of the input is messages. Two bytes before each message give its
// length.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "box/server/request_handler.h"
#include "box/verbs/client/remote_segment.h"
#include "box/verbs/client/reply_assembly.h"
#include "box/verbs/common/handshake.h"
#include "box/verbs/server/challenges.h"
#include "box/verbs/server/request_message.h"

namespace hbm::box::verbs {
namespace {

using Bytes = std::span<const std::byte>;
using protocol::Opcode;

constexpr uint32_t kMostQueuePairs = 4;
constexpr protocol::MacKey kKey{};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Returns a copy of the next message, so that the sanitizer detects a read past the message's end.
std::vector<std::byte> next_message(Bytes& input) {
  if (input.size() < 2) {
    input = {};
    return {};
  }
  const auto wanted = std::to_integer<size_t>(input[0]) | std::to_integer<size_t>(input[1]) << 8;
  input = input.subspan(2);
  const Bytes message = input.first(std::min(wanted, input.size()));
  input = input.subspan(message.size());
  return {message.begin(), message.end()};
}

// Appends the right tag to each message. Without `tags`, changes nothing.
class Sender {
 public:
  explicit Sender(bool tags) {
    if (tags) authenticator_.emplace(kKey);
  }

  void send(std::vector<std::byte>& message) {
    if (!authenticator_) return;
    const protocol::Tag tag = authenticator_->next_tag(message);
    message.insert(message.end(), tag.begin(), tag.end());
  }

 private:
  std::optional<protocol::Authenticator> authenticator_;
};

// A client that has a challenge of the box. `named`: the number of queue pairs that the client has
// announced. `admitted`: the number that the box has admitted.
struct AdmittedClient {
  protocol::Hello hello{};
  uint32_t named = 0;
  uint32_t admitted = 0;
};

void call_box(Bytes input, const std::string& token, bool properly) {
  server::Challenges challenges(token, /*seal=*/true, kMostQueuePairs);
  std::map<uint32_t, AdmittedClient> issued;
  while (!input.empty()) {
    const std::vector<std::byte> data = next_message(input);
    auto call = common::decode<common::CallMessage>(data.data(), data.size());
    if (!call) continue;
    if (call->queue_pairs == 0) {
      const common::ChallengeMessage challenge = challenges.issue();
      issued[challenge.challenge_id] = {challenge.hello};
      continue;
    }
    if (properly && issued.contains(call->challenge_id)) {
      prove(*call, token, issued[call->challenge_id].hello);
    }
    try {
      challenges.met_by(*call);
    } catch (const box::server::Refusal& no) {
      const common::RefusalMessage sent = common::refusal(no.status(), no.what());
      if (!std::string(no.what()).starts_with(cause_of(sent))) fail("a refusal has other words");
      continue;
    }
    challenges.admitted(*call);
    if (!token.empty() && !properly)
      fail("a queue pair was admitted that had not proved the token");
    if (!issued.contains(call->challenge_id)) fail("a queue pair was admitted without a challenge");
    AdmittedClient& client = issued[call->challenge_id];
    if (call->queue_pairs > kMostQueuePairs || call->queue_pair != client.admitted++)
      fail("a queue pair came out of order");
    if (client.named != 0 && client.named != call->queue_pairs) fail("a client changed its mind");
    client.named = call->queue_pairs;
    if (client.admitted > client.named) fail("more queue pairs came than were named");
    const bool authenticates = mac_keys(*call, token, client.hello).has_value();
    if (authenticates == token.empty())
      fail("a client with a token authenticates, and no other does");
  }
}

void answer_client(Bytes input, const std::string& token) {
  while (!input.empty()) {
    const std::vector<std::byte> data = next_message(input);
    const auto challenge = common::decode<common::ChallengeMessage>(data.data(), data.size());
    const auto refusal = common::decode<common::RefusalMessage>(data.data(), data.size());
    const auto welcome = common::decode<common::WelcomeMessage>(data.data(), data.size());
    if (challenge.has_value() + refusal.has_value() + welcome.has_value() > 1) {
      fail("an answer is two things at once");
    }
    if (refusal && cause_of(*refusal).size() > sizeof(refusal->cause)) fail("words have no end");
    if (!challenge) continue;
    common::CallMessage call{};
    prove(call, token, challenge->hello);
    if (!proves(call, token, challenge->hello)) fail("a proof is none to its own maker");
  }
}

void send_box(Bytes input, bool authenticated, Sender sender) {
  std::optional<protocol::Authenticator> authenticator;
  if (authenticated) authenticator.emplace(kKey);
  try {
    while (!input.empty()) {
      std::vector<std::byte> sent = next_message(input);
      sender.send(sent);
      const Bytes message = authenticator ? authenticator->verify(sent) : Bytes(sent);
      const server::RequestMessage request = server::parse_request(message);
      const int wanted = protocol::request_body_bytes(request.header.opcode);
      if (static_cast<int>(request.body.size()) != wanted ||
          sizeof(request.header) + request.body.size() != message.size()) {
        fail("a request has a body of another size");
      }
      std::vector<std::byte> body(request.body.begin(), request.body.end());
      const bool makes = request.header.opcode == Opcode::kAlloc ||
                         request.header.opcode == Opcode::kAttach ||
                         request.header.opcode == Opcode::kFree;
      if (!makes && request.handle != 0) fail("a request has a handle that it does not name");
    }
  } catch (const Error&) {
  }
}

// A client with a request of each kind in flight.
class AskingClient {
 public:
  explicit AskingClient(bool authenticated) {
    if (authenticated) assembly_.authenticate(kKey);
    for (const Opcode opcode :
         {Opcode::kAlloc, Opcode::kAttach, Opcode::kFree, Opcode::kDelete, Opcode::kAccumulate,
          Opcode::kFetchAdd, Opcode::kStats, Opcode::kExists, Opcode::kPing}) {
      auto& request = requests_.emplace_back(std::make_unique<transport::TransportRequest>());
      request->opcode = opcode;
      request->body.resize(static_cast<size_t>(protocol::request_body_bytes(opcode)));
      assembly_.expect(*request);
    }
  }

  void take(Bytes input, Sender sender) {
    try {
      while (!input.empty()) {
        std::vector<std::byte> sent = next_message(input);
        sender.send(sent);
        if (auto* const request = assembly_.take(sent)) look_at(*request);
      }
    } catch (const transport::Broken&) {
    }
  }

 private:
  static void look_at(transport::TransportRequest& request) {
    if (request.done.exchange(true)) fail("a request was answered twice");
    const bool good = request.status == protocol::Status::kOk;
    if (request.reply.size() != (good ? protocol::reply_body_bytes(request.opcode) : 0)) {
      fail("a reply has a body of another size");
    }
    if (!good && !request.payload.empty()) fail("a refusal has a payload");
    if (!good || (request.opcode != Opcode::kAlloc && request.opcode != Opcode::kAttach)) return;
    const client::RemoteSegment segment = client::granted_segment(request, kMostQueuePairs);
    if (segment.rkeys.size() != kMostQueuePairs)
      fail("a segment has not a key for each queue pair");
    for (const uint64_t offset : {uint64_t{0}, segment.size, UINT64_MAX}) {
      for (const uint32_t bytes : {0u, 1u, UINT32_MAX}) {
        const bool within = offset <= UINT64_MAX - bytes && offset + bytes <= segment.size;
        if (segment.contains({offset, bytes, 0}) != within) fail("a transfer ends past a segment");
      }
    }
  }

  std::vector<std::unique_ptr<transport::TransportRequest>> requests_;
  client::ReplyAssembly assembly_;
};

}  // namespace
}  // namespace hbm::box::verbs

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hbm::box::verbs;
  if (size == 0) return 0;
  const Bytes input = std::as_bytes(std::span(data + 1, size - 1));
  const bool has_token = (data[0] & 4) != 0;
  const bool properly = has_token && (data[0] & 8) != 0;
  const std::string token = has_token ? "token" : "";
  switch (data[0] & 3) {
    case 0:
      call_box(input, token, properly);
      break;
    case 1:
      answer_client(input, token);
      break;
    case 2:
      send_box(input, has_token, Sender(properly));
      break;
    default:
      AskingClient(has_token).take(input, Sender(properly));
  }
  return 0;
}
