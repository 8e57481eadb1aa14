// A memory box in this process: memory that clients in other processes and on other machines
// allocate, read, write and sum into.
//
// It serves clients from the end of the constructor until close(). Nothing that a client does ends
// it.
//
// Threads: any; close() and the destructor wait for other calls. In a forked child a Server must
// not be used; destroying it there does nothing.
#pragma once

#include <chrono>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "base/fork.h"
#include "box/server/statistics.h"
#include "box/server_options.h"
#include "memory/pool.h"

namespace hbm::box {

// Returns the reason if this host cannot serve clients over RDMA, else an empty string.
std::string why_no_verbs();

struct ServerStats {
  server::Statistics box;
  memory::PoolStats pool;
};

class Server {
 public:
  // Starts the box. Throws Error(kInvalid) or Error(kUnsupported) for invalid options, with nothing
  // created. Throws Error(kUnavailable) or Error(kExhausted) if a part of the box cannot start; the
  // text names the part and the reason. In this case the store's directory may remain; everything
  // else that was created is removed.
  explicit Server(const ServerOptions& options);
  ~Server();  // closes
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Returns the address for clients: the first TCP address, or the Unix socket if there is no TCP.
  const std::string& url() const noexcept { return urls_.front(); }
  const std::vector<std::string>& urls() const noexcept {
    return urls_;
  }  // all addresses, the Unix socket last

  // Throws Error(kUnavailable) once the box is closed.
  ServerStats stats() const;

  // Accepts no further clients or requests. Returns when all requests that were read are answered,
  // or after `most`.
  void drain(std::chrono::milliseconds most);

  // Drains for up to kCloseDrainTimeout, and stops. Without a store all segments are lost. Does
  // nothing when called again.
  void close();
  bool closed() const;

 private:
  struct Parts;

  const ForkGuard fork_;
  std::vector<std::string> urls_;
  mutable std::shared_mutex mutex_;  // guards parts_; locked shared by users of the parts
  std::unique_ptr<Parts> parts_;     // null once the box is closed
};

}  // namespace hbm::box
