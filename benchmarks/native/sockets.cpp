// The program "sockets": one end of plain sockets between two processes.
//
//   listen HOST CONNECTIONS BYTES MODE
//       Answers with a port. Serves the client that connects to it until the client closes. MODE is
//       "threads" or "poll" (connections.h).
//   connect HOST PORT CONNECTIONS BYTES MODE
//       Connects to a listening end. Replaces earlier connections.
//   run ACTION SAMPLES CALLS
//       Times "read" or "write" of all bytes, on the client.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"
#include "connections.h"
#include "program.h"

namespace hbm::bench {
namespace {

int checked(int result, const char* call) {
  if (result >= 0) return result;
  throw Error(ErrorKind::kNetwork, std::string(call) + ": " + std::strerror(errno));
}

sockaddr_in address_of(const std::string& host, size_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) {
    throw Error(ErrorKind::kInvalid, "\"" + host + "\" is no IPv4 address");
  }
  return address;
}

Descriptor new_socket() {
  return Descriptor(checked(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket"));
}

int ready(int connection) {
  const int on = 1;
  checked(setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)), "setsockopt");
  return connection;
}

ConnectionMode mode_of(const std::string& name) {
  return name == "threads" ? ConnectionMode::kThreads : ConnectionMode::kPoll;
}

// Accepts one client's sockets, and serves them until the client closes.
void serve_one(const Descriptor& listener, size_t count, size_t bytes, ConnectionMode mode) try {
  std::vector<int> sockets;
  while (sockets.size() < count) {
    sockets.push_back(ready(checked(accept(listener.get(), nullptr, nullptr), "accept")));
  }
  const Pages pages(bytes);
  Connections(std::move(sockets), pages.bytes(), mode).serve();
} catch (const std::exception&) {
  // No report is needed here: the client reports that its sockets were closed.
}

Numbers listen_at(const Words& words) {
  sockaddr_in address = address_of(words.at(0), 0);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof(address);
  Descriptor listener = new_socket();
  checked(bind(listener.get(), any, size), "bind");
  checked(listen(listener.get(), 64), "listen");
  checked(getsockname(listener.get(), any, &size), "getsockname");
  std::thread([listener = std::move(listener), count = number(words, 1), bytes = number(words, 2),
               mode = mode_of(words.at(3))] {
    serve_one(listener, count, bytes, mode);
  }).detach();
  return {static_cast<double>(ntohs(address.sin_port))};
}

class Client {
 public:
  void connect_to(const Words& words) {
    const sockaddr_in address = address_of(words.at(0), number(words, 1));
    connections_.reset();  // uses pages_
    pages_ = std::make_unique<Pages>(number(words, 3));
    std::vector<int> sockets;
    while (sockets.size() < number(words, 2)) {
      Descriptor one = new_socket();
      const auto* const any = reinterpret_cast<const sockaddr*>(&address);
      checked(connect(one.get(), any, sizeof(address)), "connect");
      sockets.push_back(ready(one.release()));
    }
    connections_ =
        std::make_unique<Connections>(std::move(sockets), pages_->bytes(), mode_of(words.at(4)));
  }

  Numbers run(const std::string& action, size_t samples, size_t calls) const {
    const bool reads = action == "read";
    return timed([&] { reads ? connections_->read() : connections_->write(); }, samples, calls);
  }

 private:
  std::unique_ptr<Pages> pages_;
  std::unique_ptr<Connections> connections_;
};

}  // namespace
}  // namespace hbm::bench

int main() {
  using namespace hbm::bench;
  Client client;
  return serve({{"listen", listen_at},
                {"connect",
                 [&](const Words& words) {
                   client.connect_to(words);
                   return Numbers();
                 }},
                {"run", [&](const Words& words) {
                   return client.run(words.at(0), number(words, 1), number(words, 2));
                 }}});
}
