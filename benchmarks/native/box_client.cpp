// The program "box_client": uses a memory box, without Python between two operations. It has a
// client for each transport, and one local buffer for all clients.
//
//   connect URL TOKEN TRANSPORT CONNECTIONS BYTES
//       Connects a client over TRANSPORT. Allocates its segment and the buffer, of BYTES each.
//   disconnect
//       Ends all clients.
//   check TRANSPORT
//       Fails unless a read returns the written bytes.
//   check_sum TRANSPORT TYPE
//       Accumulates ones of TYPE. Fails if the sum is wrong. Leaves ones in the source segment.
//   run TRANSPORT ACTION SAMPLES CALLS
//       Times an action of client_loop.h.
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "base/error.h"
#include "client_loop.h"
#include "program.h"

namespace hbm::bench {
namespace {

class Clients {
 public:
  void connect(const Words& words) {
    const std::string& transport = words.at(2);
    loops_.erase(transport);
    const size_t bytes = number(words, 4);
    if (loops_.empty()) local_ = std::make_unique<Pages>(bytes);
    if (local_->bytes().size() != bytes) {
      throw Error(ErrorKind::kInvalid,
                  "all clients share one buffer: disconnect before another size");
    }
    box::client::ClientOptions options;
    options.url = words.at(0);
    options.token = words.at(1);
    options.transport = box::client::parse_transport(transport);
    options.lanes = static_cast<uint32_t>(number(words, 3));
    loops_[transport] = std::make_unique<ClientLoop>(options, local_->bytes());
  }

  void disconnect() { loops_.clear(); }

  ClientLoop& at(const std::string& transport) {
    const auto found = loops_.find(transport);
    if (found == loops_.end()) {
      throw Error(ErrorKind::kInvalid, "no client is connected over " + transport);
    }
    return *found->second;
  }

 private:
  std::unique_ptr<Pages> local_;
  std::map<std::string, std::unique_ptr<ClientLoop>> loops_;
};

}  // namespace
}  // namespace hbm::bench

int main() {
  using namespace hbm::bench;
  Clients clients;
  return serve({{"connect",
                 [&](const Words& words) {
                   clients.connect(words);
                   return Numbers();
                 }},
                {"disconnect",
                 [&](const Words&) {
                   clients.disconnect();
                   return Numbers();
                 }},
                {"check",
                 [&](const Words& words) {
                   clients.at(words.at(0)).check();
                   return Numbers();
                 }},
                {"check_sum",
                 [&](const Words& words) {
                   clients.at(words.at(0)).check_sum(words.at(1));
                   return Numbers();
                 }},
                {"run", [&](const Words& words) {
                   const auto action = clients.at(words.at(0)).action(words.at(1));
                   return timed(action, number(words, 2), number(words, 3));
                 }}});
}
