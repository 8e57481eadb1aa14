#include "box/transport/hangup_watch.h"

#include <poll.h>

#include <cerrno>
#include <utility>

#include "base/threads.h"

namespace hbm::transport {

HangupWatch::HangupWatch(std::vector<int> sockets, std::function<void()> then)
    : then_(std::move(then)) {
  const SignalsHeldOff held_off;
  thread_ = std::thread([this, sockets = std::move(sockets)] { watch(sockets); });
}

HangupWatch::~HangupWatch() {
  stop_.ring();
  thread_.join();
}

void HangupWatch::watch(const std::vector<int>& sockets) {
  std::vector<pollfd> watched = {{stop_.fd(), POLLIN, 0}};
  for (int socket : sockets) watched.push_back({socket, POLLRDHUP, 0});
  while (poll(watched.data(), watched.size(), -1) < 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    break;  // the kernel cannot watch: nobody may trust the connection
  }
  if (watched.front().revents != 0) return;
  hung_up_.store(true, std::memory_order_release);
  then_();
}

}  // namespace hbm::transport
