#include "box/server/service.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "box/server/request_handler.h"

namespace hbm::box::server {
namespace {

constexpr const char* kClosing = "the box is shutting down";

}  // namespace

Service::Service(const ServiceOptions& options, storage::Store& store, const memory::Pool& pool)
    : store_(store),
      pool_(pool),
      registry_(store),
      accumulator_(store.records(), options.accumulate_threads),
      run_queue_(std::max(options.most_clients, store.records().sessions().size()),
                 options.handlers,
                 [this](const std::shared_ptr<Session>& session) { serve(session); }),
      sessions_({.lease = options.lease,
                 .most = options.most_clients,
                 .expired = [this](const std::shared_ptr<Session>& session) { expire(session); },
                 .settled = [this] { registry_.remove_unattached(); }},
                store.records()),
      requests_(registry_, sessions_, store.records(), accumulator_, totals_) {}

Service::~Service() { close(); }

void Service::close() {
  closing_.store(true, std::memory_order_release);
  run_queue_.close();
}

uint32_t Service::lease_ms() const { return static_cast<uint32_t>(sessions_.lease().count()); }

Joining Service::join(const protocol::Join& join, protocol::TransportKind transport,
                      const std::string& host) {
  if (!closing_.load(std::memory_order_acquire)) return sessions_.join(join, transport, host);
  Joining joining;
  joining.status = protocol::Status::kClosing;
  joining.cause = kClosing;
  return joining;
}

void Service::left(const std::shared_ptr<Session>& session) {
  session->renew();
  --session->connections;
}

void Service::submit(const std::shared_ptr<Session>& session, protocol::Opcode opcode,
                     std::span<const std::byte> body, Answer answer) {
  session->renew();
  QueuedRequest request{opcode, {body.begin(), body.end()}, std::move(answer)};
  try {
    if (session->push(std::move(request))) schedule(session);
  } catch (const Refusal& refusal) {
    request.answer(refused(refusal.status(), refusal.what()));
  }
}

void Service::schedule(const std::shared_ptr<Session>& session) {
  if (!run_queue_.put(session)) serve(session);
}

void Service::serve(const std::shared_ptr<Session>& session) {
  do {
    const QueuedRequest request = session->pop();
    request.answer(reply_to(*session, request));
  } while (!session->idle() && !run_queue_.put(session));
}

Reply Service::reply_to(Session& session, const QueuedRequest& request) {
  if (closing_.load(std::memory_order_acquire))
    return refused(protocol::Status::kClosing, kClosing);
  if (request.opcode == protocol::Opcode::kStats) return stats(session, request.body);
  return requests_.dispatch(session, request.opcode, request.body);
}

Reply Service::stats(const Session& session, std::span<const std::byte> body) const {
  const auto query = protocol::read_as<protocol::StatsQuery>(body);
  Reply reply;
  try {
    reply.payload = page(statistics(), query, {session.identity().id, session.keys(), salt_});
  } catch (const std::exception& error) {
    log::error(std::string("cannot tell a client the statistics: ") + error.what());
    return refused(protocol::Status::kInternal, error.what());
  }
  return reply;
}

void Service::expire(const std::shared_ptr<Session>& session) {
  bool first = false;
  try {
    first = session->push({protocol::Opcode::kLeave, {}, [](const Reply&) {}});
  } catch (const Refusal&) {
    return;  // the client has just left
  }
  if (first) schedule(session);
}

bool Service::ended(const std::shared_ptr<Session>& session) const { return session->ended(); }

Access Service::access(const std::shared_ptr<Session>& session, const protocol::Transfer& transfer,
                       bool writing) {
  session->renew();
  Access access;
  try {
    if (closing_.load(std::memory_order_acquire))
      throw Refusal(protocol::Status::kClosing, kClosing);
    if (session->ended()) throw Refusal(protocol::Status::kExpired, "the session has ended");
    SessionAttachment attachment = attached(*session, transfer.handle);
    if (writing) require_write(*session, attachment);
    require_range(*attachment.segment, transfer.offset, transfer.bytes, 1);
    access.at = attachment.segment->block->base() + transfer.offset;
    access.segment = std::move(attachment.segment);
  } catch (const Refusal& refusal) {
    access.status = refusal.status();
    access.cause = refusal.what();
    return access;
  }
  const protocol::Opcode opcode = writing ? protocol::Opcode::kWrite : protocol::Opcode::kRead;
  for (storage::Counters* counters : {&totals_, &session->counters, &access.segment->counters}) {
    counters->count(opcode, transfer.bytes);
  }
  return access;
}

void Service::on_new_segment(std::function<void(storage::BoxSegment&)> action) {
  registry_.on_new_segment(std::move(action));
}

Statistics Service::statistics() const {
  Statistics statistics;
  const Clock::time_point now = Clock::now();
  for (const auto& session : sessions_.all()) {
    statistics.clients.push_back(session->statistics(now));
    statistics.hosts.push_back(session->host());
  }
  statistics.segments = registry_.statistics();

  const memory::PoolStats pool = pool_.stats();
  statistics.totals.counts = totals_.counts();
  statistics.totals.capacity_bytes = pool.capacity;
  statistics.totals.used_bytes = pool.used;
  statistics.totals.largest_free_bytes = pool.largest_free;
  statistics.totals.clients = statistics.clients.size();
  statistics.totals.segments = statistics.segments.size();
  statistics.totals.uptime_ms = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(now - start_).count());
  return statistics;
}

}  // namespace hbm::box::server
