// The service of a box, behind its listeners: keys, clients and what they ask for.
//
// Requests go into the message ring (message_ring.h), and handler threads execute them
// (requests.h); access() admits slices of reads and writes, on the listener's thread. A timer ends
// the sessions of clients that are gone (sessions.h).
//
// Threads: as RequestHandler's; close() by one thread. Locks: Sessions, then Session, then
// MessageRing; the registry's and the store's are never held together with these.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "box/protocol/proof.h"
#include "box/server/accumulator.h"
#include "box/server/message_ring.h"
#include "box/server/registry.h"
#include "box/server/request_handler.h"
#include "box/server/requests.h"
#include "box/server/session.h"
#include "box/server/sessions.h"
#include "box/server/statistics.h"
#include "box/server/storage/segment.h"
#include "box/server/storage/store.h"
#include "memory/pool.h"

namespace hbm::box {

struct ServiceOptions {
  std::chrono::milliseconds lease{30'000};
  size_t most_clients = 4096;
  unsigned handlers = 2;            // threads that execute requests
  unsigned accumulate_threads = 2;  // that share one large accumulate
};

class Service final : public RequestHandler {
 public:
  // REQUIRES: `store` was opened on `pool`, and both outlive it.
  Service(const ServiceOptions& options, Store& store, const memory::Pool& pool);
  ~Service() override;

  smb::Id contents() const override { return store_.contents(); }
  uint32_t lease_ms() const override;
  Joining join(const smb::Join& join, smb::TransportKind transport) override;
  void left(const std::shared_ptr<Session>& session) override;
  void submit(const std::shared_ptr<Session>& session, smb::Opcode opcode,
              std::span<const std::byte> body, Answer answer) override;
  Access access(const std::shared_ptr<Session>& session, const smb::Transfer& transfer,
                bool writing) override;
  void on_new_segment(std::function<void(BoxSegment&)> action) override;
  bool ended(const std::shared_ptr<Session>& session) const override;

  Statistics statistics() const;  // with all ids and keys: not for clients

  // Answers everything with kClosing from here on, also the requests in the ring. Returns when
  // those that were being carried out are answered.
  void close();

 private:
  // Has a handler serve a session that push() wants in the ring.
  void schedule(const std::shared_ptr<Session>& session);
  // Answers one request of the session, and puts it back into the ring if there are more. Once the
  // ring is closed, refuses all of them.
  void serve(const std::shared_ptr<Session>& session);
  Reply reply_to(Session& session, const QueuedRequest& request);
  Reply stats(const Session& session, std::span<const std::byte> body) const;
  void expire(const std::shared_ptr<Session>& session);

  Store& store_;
  const memory::Pool& pool_;
  const Clock::time_point start_ = Clock::now();
  const smb::Nonce salt_ = smb::random_nonce();  // of what clients see of each other
  std::atomic<bool> closing_{false};
  Counters totals_;
  Registry registry_;
  Accumulator accumulator_;
  MessageRing ring_;
  Sessions sessions_;
  Requests requests_;
};

}  // namespace hbm::box
