// A memory box: memory that clients of other processes and machines allocate, read, write and sum
// into, in this process.
//
// It is served from the end of the constructor until close(). Nothing that a client does ends it.
//
// Threads: every member may be called from any thread; close() and the destructor wait for the
// others. In a forked child a Server is of no use, and its end does nothing.
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

// Why this host cannot let clients in over RDMA, in words; empty: it can.
std::string why_no_verbs();

struct ServerStats {
  Statistics box;
  memory::PoolStats pool;
};

class Server {
 public:
  // Throws Error(kInvalid) or Error(kUnsupported) for options that make no box, before anything is
  // made; else Error with the part that failed and why (kUnavailable, kExhausted), with nothing
  // left behind but the store.
  explicit Server(const ServerOptions& options);
  ~Server();  // closes
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // The address for clients: the first one of TCP, or the Unix socket when there is none.
  const std::string& url() const noexcept { return urls_.front(); }
  const std::vector<std::string>& urls() const noexcept { return urls_; }  // all, the Unix one last

  // Throws Error(kUnavailable) once it is closed.
  ServerStats stats() const;

  // Takes no further clients or requests, and returns when what was read is answered, or after
  // `most`.
  void drain(std::chrono::milliseconds most);

  // Drains for a moment, and stops. Without a store all segments are gone. Does nothing the second
  // time.
  void close();
  bool closed() const;

 private:
  struct Parts;

  const ForkGuard fork_;
  std::vector<std::string> urls_;
  mutable std::shared_mutex mutex_;  // guards parts_: shared by whoever uses them
  std::unique_ptr<Parts> parts_;     // none: closed
};

}  // namespace hbm::box
