// The three parts of a client. Each knows only the parts before it.
//
// The request table has the unfinished operations, the attachments and the connection's status, and
// owns the lock on them. The driver has the transport and the posted operations, and owns the hold
// of the one thread that drives. The reconnector has the session, and owns the thread that
// reconnects.
//
// Threads: any. Lock order: close(), the driver's hold, the table's lock.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>

#include "box/client/dialer.h"
#include "box/client/driver.h"
#include "box/client/operation.h"
#include "box/client/options.h"
#include "box/client/reconnector.h"
#include "box/client/request_table.h"

namespace hbm::client {

class Core {
 public:
  explicit Core(const ClientOptions& options);  // connects, as Client
  // REQUIRES: close() was called.
  ~Core() = default;
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // The segment itself. Throws what an operation on the attachment would, and
  // Error(kUnsupported) where it is not mapped.
  std::shared_ptr<std::byte> memory(const Attachment& attachment);

  // Waits up to `patience` for unfinished operations, then closes. An exception of `while_waiting`
  // ends the wait, and is thrown once all is closed.
  void close(std::chrono::milliseconds patience);
  bool closed() const;

  const ClientOptions options;
  Dialer dialer;  // the reconnector's, once it has connected; else for const members alone
  RequestTable table;
  Driver driver;

 private:
  Reconnector reconnector_;
  std::mutex closer_;  // one close() at a time
};

}  // namespace hbm::client
