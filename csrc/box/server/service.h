// The service of a box: manages keys and clients, and executes the requests that listeners pass on.
//
// A request is queued in its session, the session enters the run queue (run_queue.h), and a handler
// thread executes the request (requests.h). access() admits slices of reads and writes on the
// thread of the listener. A timer ends sessions whose lease is over (sessions.h).
//
// Threads: as RequestHandler; close() by one thread. Lock order: Sessions, then one of Session,
// RunQueue and the lock of the store's records. No two of these three are held together. The lock
// of the registry is never held together with Sessions, Session or RunQueue.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "box/protocol/proof.h"
#include "box/server/accumulator.h"
#include "box/server/registry.h"
#include "box/server/request_handler.h"
#include "box/server/requests.h"
#include "box/server/run_queue.h"
#include "box/server/session.h"
#include "box/server/sessions.h"
#include "box/server/statistics.h"
#include "box/server/storage/segment.h"
#include "box/server/storage/store.h"
#include "memory/pool.h"

namespace hbm::box::server {

struct ServiceOptions {
  std::chrono::milliseconds lease{30'000};
  size_t most_clients = 4096;
  unsigned handlers = 2;            // threads that execute requests
  unsigned accumulate_threads = 2;  // threads that share one large accumulate
};

class Service final : public RequestHandler {
 public:
  // REQUIRES: `store` was opened on `pool`; both outlive this object.
  Service(const ServiceOptions& options, storage::Store& store, const memory::Pool& pool);
  ~Service() override;

  protocol::Id generation() const override { return store_.generation(); }
  uint32_t lease_ms() const override;
  Joining join(const protocol::Join& join, protocol::TransportKind transport,
               const std::string& host) override;
  void left(const std::shared_ptr<Session>& session) override;
  void submit(const std::shared_ptr<Session>& session, protocol::Opcode opcode,
              std::span<const std::byte> body, Answer answer) override;
  Access access(const std::shared_ptr<Session>& session, const protocol::Transfer& transfer,
                bool writing) override;
  void on_new_segment(std::function<void(storage::BoxSegment&)> action) override;
  bool ended(const std::shared_ptr<Session>& session) const override;

  Statistics statistics() const;  // has all ids, keys and hosts: not for clients

  // Refuses all requests with kClosing from now on, including queued ones. Returns when the
  // requests being executed are answered.
  void close();

 private:
  // Appends a session to the run queue, after Session::push() has returned true.
  void schedule(const std::shared_ptr<Session>& session);
  // Answers one request of the session, and appends the session to the run queue if it has more.
  // Once the queue is closed, refuses all requests of the session.
  void serve(const std::shared_ptr<Session>& session);
  Reply reply_to(Session& session, const QueuedRequest& request);
  Reply stats(const Session& session, std::span<const std::byte> body) const;
  void expire(const std::shared_ptr<Session>& session);

  storage::Store& store_;
  const memory::Pool& pool_;
  const Clock::time_point start_ = Clock::now();
  const protocol::Nonce salt_ =
      protocol::random_nonce();  // of the fingerprints that clients see of each other
  std::atomic<bool> closing_{false};
  storage::Counters totals_;
  Registry registry_;
  Accumulator accumulator_;
  RunQueue run_queue_;
  Sessions sessions_;
  Requests requests_;
};

}  // namespace hbm::box::server
