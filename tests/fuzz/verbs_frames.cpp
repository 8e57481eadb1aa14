// A libFuzzer target: an end of an RDMA connection that sends the other whatever it likes, without
// a device.
//
// The first byte of the input says what. Bits 0 and 1: 0, connection requests to a box; 1, the
// private data of a box's answer; 2, messages to a box; 3, messages to a client that has asked for
// one thing of each kind. Bit 2: there is a token, so requests are proved and messages sealed; bit
// 3, properly. The rest is messages, each after its length in two bytes.
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

namespace hbm::verbs {
namespace {

using Bytes = std::span<const std::byte>;
using smb::Opcode;

constexpr uint32_t kMostLanes = 4;
constexpr smb::SealKey kKey{};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// A copy of its own, so that the sanitizer sees who reads past its end.
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

// Tags the messages of whoever knows the key.
class Sender {
 public:
  explicit Sender(bool tags) {
    if (tags) seal_.emplace(kKey);
  }

  void send(std::vector<std::byte>& message) {
    if (!seal_) return;
    const smb::Tag tag = seal_->next(message);
    message.insert(message.end(), tag.begin(), tag.end());
  }

 private:
  std::optional<smb::Seal> seal_;
};

// The lanes of a client that a box has let in under one challenge.
struct ClientLanes {
  smb::Hello hello{};
  uint32_t named = 0;
  uint32_t let_in = 0;
};

void call_box(Bytes input, const std::string& token, bool properly) {
  Challenges challenges(token, /*seal=*/true, kMostLanes);
  std::map<uint32_t, ClientLanes> issued;
  while (!input.empty()) {
    const std::vector<std::byte> data = next_message(input);
    auto call = decode<CallMessage>(data.data(), data.size());
    if (!call) continue;
    if (call->lanes == 0) {
      const ChallengeMessage challenge = challenges.issue();
      issued[challenge.ticket] = {challenge.hello};
      continue;
    }
    if (properly && issued.contains(call->ticket)) {
      prove(*call, token, issued[call->ticket].hello);
    }
    try {
      challenges.met_by(*call);
    } catch (const box::Refusal& no) {
      const RefusalMessage sent = refusal(no.status(), no.what());
      if (!std::string(no.what()).starts_with(cause_of(sent))) fail("a refusal has other words");
      continue;
    }
    challenges.let_in(*call);
    if (!token.empty() && !properly) fail("a lane was let in that had not proved the token");
    if (!issued.contains(call->ticket)) fail("a lane was let in without a challenge");
    ClientLanes& lanes = issued[call->ticket];
    if (call->lanes > kMostLanes || call->lane != lanes.let_in++) fail("a lane came out of order");
    if (lanes.named != 0 && lanes.named != call->lanes) fail("a client changed its mind");
    lanes.named = call->lanes;
    if (lanes.let_in > lanes.named) fail("more lanes came than were named");
    const bool seals = seal_keys(*call, token, lanes.hello).has_value();
    if (seals == token.empty()) fail("a client with a token seals, and no other does");
  }
}

void answer_client(Bytes input, const std::string& token) {
  while (!input.empty()) {
    const std::vector<std::byte> data = next_message(input);
    const auto challenge = decode<ChallengeMessage>(data.data(), data.size());
    const auto refusal = decode<RefusalMessage>(data.data(), data.size());
    const auto welcome = decode<WelcomeMessage>(data.data(), data.size());
    if (challenge.has_value() + refusal.has_value() + welcome.has_value() > 1) {
      fail("an answer is two things at once");
    }
    if (refusal && cause_of(*refusal).size() > sizeof(refusal->cause)) fail("words have no end");
    if (!challenge) continue;
    CallMessage call{};
    prove(call, token, challenge->hello);
    if (!proves(call, token, challenge->hello)) fail("a proof is none to its own maker");
  }
}

void send_box(Bytes input, bool sealed, Sender sender) {
  std::optional<smb::Seal> seal;
  if (sealed) seal.emplace(kKey);
  try {
    while (!input.empty()) {
      std::vector<std::byte> sent = next_message(input);
      sender.send(sent);
      const Bytes message = seal ? seal->open(sent) : Bytes(sent);
      const RequestMessage request = parse_request(message);
      const int wanted = smb::request_body_bytes(request.header.opcode);
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

// A client with a request of each kind under way.
class AskingClient {
 public:
  explicit AskingClient(bool sealed) {
    if (sealed) assembly_.seal(kKey);
    for (const Opcode opcode :
         {Opcode::kAlloc, Opcode::kAttach, Opcode::kFree, Opcode::kDelete, Opcode::kAccumulate,
          Opcode::kFetchAdd, Opcode::kStats, Opcode::kExists, Opcode::kPing}) {
      auto& request = requests_.emplace_back(std::make_unique<transport::TransportRequest>());
      request->opcode = opcode;
      request->body.resize(static_cast<size_t>(smb::request_body_bytes(opcode)));
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
    const bool good = request.status == smb::Status::kOk;
    if (request.reply.size() != (good ? smb::reply_body_bytes(request.opcode) : 0)) {
      fail("a reply has a body of another size");
    }
    if (!good && !request.payload.empty()) fail("a refusal has a payload");
    if (!good || (request.opcode != Opcode::kAlloc && request.opcode != Opcode::kAttach)) return;
    const RemoteSegment segment = granted_segment(request, kMostLanes);
    if (segment.rkeys.size() != kMostLanes) fail("a segment has not a key for each lane");
    for (const uint64_t offset : {uint64_t{0}, segment.size, UINT64_MAX}) {
      for (const uint32_t bytes : {0u, 1u, UINT32_MAX}) {
        const bool within = offset <= UINT64_MAX - bytes && offset + bytes <= segment.size;
        if (segment.contains({offset, bytes, 0}) != within) fail("a transfer ends past a segment");
      }
    }
  }

  std::vector<std::unique_ptr<transport::TransportRequest>> requests_;
  ReplyAssembly assembly_;
};

}  // namespace
}  // namespace hbm::verbs

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hbm::verbs;
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
