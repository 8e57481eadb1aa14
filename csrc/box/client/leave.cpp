#include "box/client/leave.h"

#include <chrono>
#include <utility>

#include "base/log.h"

namespace hbm::client {

void leave(std::unique_ptr<transport::Transport> link, const std::string& box) {
  constexpr auto kPatience = std::chrono::seconds(1);
  transport::TransportRequest request;
  request.opcode = smb::Opcode::kLeave;
  const std::unique_ptr<transport::Transport> last =
      std::move(link);  // ends before the request does
  try {
    last->post(request);
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!request.finished() && std::chrono::steady_clock::now() < deadline) {
      last->progress(deadline - std::chrono::steady_clock::now());
    }
  } catch (const Error& error) {
    log::debug("cannot take leave of the box at " + box + ": " + error.what());
  }
}

}  // namespace hbm::client
