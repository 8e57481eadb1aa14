#include "box/server/listener/stream_acceptor.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "box/protocol/socket.h"
#include "box/server/tuning.h"

namespace hbm::box::server::listener {
namespace {

mode_t file_mode(const std::vector<uid_t>& users) {
  const bool others = std::any_of(users.begin(), users.end(),
                                  [](uid_t user) { return user != geteuid() && user != 0; });
  return others ? 0666 : 0600;  // admits() checks each client
}

void refuse_user(Descriptor client) {
  constexpr std::string_view cause = "this user may not use the box's Unix socket";
  protocol::FrameStream stream(std::move(client));
  protocol::Header header;
  header.opcode = protocol::Opcode::kHello;
  header.status = protocol::Status::kDenied;
  stream.queue(header, {}, std::as_bytes(std::span(cause)));
  stream.flush();
}

}  // namespace

StreamAcceptor::StreamAcceptor(StreamContext& context, const Loops& loops,
                               const protocol::Address& address, std::vector<uid_t> users)
    : context_(context),
      loops_(loops),
      users_(std::move(users)),
      address_(address),
      socket_(protocol::listen_at(address, file_mode(users_))) {
  if (!address_.is_unix()) address_.port = protocol::local_port(fd());
}

StreamAcceptor::~StreamAcceptor() {
  if (address_.is_unix()) unlink(address_.path.c_str());
}

EventLoop::Next StreamAcceptor::serve(uint32_t /*events*/) noexcept {
  if (context_.draining.load(std::memory_order_relaxed)) return EventLoop::Next::kGone;
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    int failure = 0;
    Descriptor client = protocol::accept_from(fd(), failure);
    try {
      if (client) {
        accept(std::move(client));
        continue;
      }
      if (failure != EAGAIN && failure != EWOULDBLOCK) pause(failure);
    } catch (const std::exception& error) {
      context_.refusals.warn(std::string("cannot accept a client: ") + error.what());
    }
    break;
  }
  return EventLoop::Next::kWait;
}

void StreamAcceptor::accept(Descriptor client) {
  if (!admits(client.get())) {
    context_.refusals.warn("refused " + protocol::peer_name(client.get()) + " at " +
                           address_.url() + ": its user may not use this box");
    return refuse_user(std::move(client));
  }
  EventLoop& loop = *loops_[next_++ % loops_.size()];
  const auto transport =
      address_.is_unix() ? protocol::TransportKind::kShm : protocol::TransportKind::kTcp;
  const auto connection =
      std::make_shared<StreamConnection>(context_, loop, std::move(client), transport);
  context_.pending.enter(connection);
  try {
    loop.add(connection->fd(), connection->events(), connection);
  } catch (...) {
    connection->gone();
    throw;
  }
}

bool StreamAcceptor::admits(int client) const {
  if (!address_.is_unix()) return true;
  const std::optional<uid_t> user = protocol::peer_user(client);
  return user && (*user == 0 || std::find(users_.begin(), users_.end(), *user) != users_.end());
}

void StreamAcceptor::pause(int failure) {
  shortages_.warn("cannot accept clients at " + address_.url() +
                  " for now: " + std::strerror(failure) +
                  (failure == EMFILE ? "; raise the limit on open files (ulimit -n)" : ""));
  paused_ = true;
  until_ = Clock::now() + kAcceptPause;
  loops_.front()->change(fd(), 0, *this);
  context_.pending.dismiss_oldest("its descriptor is needed for another client");
}

int StreamAcceptor::resume() noexcept {
  if (!paused_) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until_ - Clock::now()).count();
  if (left > 0) return static_cast<int>(left);
  paused_ = false;
  loops_.front()->change(fd(), EPOLLIN, *this);
  return -1;
}

}  // namespace hbm::box::server::listener
