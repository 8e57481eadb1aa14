#include "box/server/sessions.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "box/protocol/proof.h"
#include "box/server/request_handler.h"

namespace hbm::box::server {

Sessions::Sessions(Options options, storage::Records& records)
    : options_(std::move(options)),
      records_(records),
      client_count_(std::make_shared<std::atomic<size_t>>(0)) {
  for (storage::SessionRecord* record : records_.sessions()) {
    absent_.emplace(record->id, Absent{record, count_client()});
  }
  watch_ = std::thread(&Sessions::watch, this);
}

Sessions::~Sessions() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  closes_.notify_one();
  watch_.join();
}

Joining Sessions::join(const protocol::Join& join, protocol::TransportKind transport,
                       const std::string& host) {
  Joining joining;
  try {
    if ((join.flags & ~(protocol::Join::kReadOnlyClient | protocol::Join::kFurtherConnection)) !=
        0) {
      throw Refusal(protocol::Status::kMalformed, "it has flags that do not exist");
    }
    const std::lock_guard lock(mutex_);
    joining.session = join.session ? resume(join, transport) : begin(join, transport);
    joining.session->renew();
    if (!host.empty()) joining.session->set_host(host);
    ++joining.session->connections;
    joining.id = joining.session->identity().id;
    joining.applied = joining.session->request_cache.applied();
    joining.resumed = static_cast<bool>(join.session) && !joining.session->identity().restored;
  } catch (const Refusal& refusal) {
    joining.status = refusal.status();
    joining.cause = refusal.what();
  } catch (const Error& error) {
    joining.status = protocol::Status::kExhausted;
    joining.cause = error.what();
  }
  return joining;
}

std::shared_ptr<const void> Sessions::count_client() {
  ++*client_count_;
  return {client_count_.get(), [count = client_count_](const void*) { --*count; }};
}

std::shared_ptr<Session> Sessions::begin(const protocol::Join& join,
                                         protocol::TransportKind transport) {
  if ((join.flags & protocol::Join::kFurtherConnection) != 0) {
    throw Refusal(protocol::Status::kMalformed,
                  "a further connection must name the session that it joins");
  }
  if (client_count_->load() >= options_.most) {
    throw Refusal(protocol::Status::kExhausted, "the box has " + std::to_string(options_.most) +
                                                    " clients, the most in its options");
  }
  const Session::Identity identity{
      .id = protocol::random_id(),
      .read_only = (join.flags & protocol::Join::kReadOnlyClient) != 0,
      .restored = false,
      .pid = join.pid,
      .transport = transport,
  };
  auto counted = count_client();
  storage::SessionRecord& record = records_.open_session(identity.id);
  auto session = std::make_shared<Session>(identity, record, std::move(counted));
  sessions_.emplace(identity.id, session);
  return session;
}

std::shared_ptr<Session> Sessions::resume(const protocol::Join& join,
                                          protocol::TransportKind transport) {
  if (const auto live = sessions_.find(join.session); live != sessions_.end()) {
    const bool read_only = (join.flags & protocol::Join::kReadOnlyClient) != 0;
    if (read_only != live->second->identity().read_only) {
      throw Refusal(protocol::Status::kMalformed, "the session began with other rights");
    }
    if (!live->second->ended()) return live->second;
  }
  const auto absent = absent_.find(join.session);
  if (absent == absent_.end() || (join.flags & protocol::Join::kFurtherConnection) != 0) {
    throw Refusal(protocol::Status::kExpired, "the session is not known here: its lease of " +
                                                  std::to_string(options_.lease.count()) +
                                                  " ms ended, or the box is another");
  }
  const Session::Identity identity{
      .id = join.session,
      .read_only = (join.flags & protocol::Join::kReadOnlyClient) != 0,
      .restored = true,
      .pid = join.pid,
      .transport = transport,
  };
  auto session =
      std::make_shared<Session>(identity, *absent->second.record, absent->second.counted);
  sessions_.emplace(identity.id, session);
  absent_.erase(absent);
  return session;
}

void Sessions::forget(const Session& session) {
  const std::lock_guard lock(mutex_);
  records_.release_session(session.record);
  sessions_.erase(session.identity().id);
}

std::vector<std::shared_ptr<Session>> Sessions::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Session>> all;
  all.reserve(sessions_.size());
  for (const auto& [id, session] : sessions_) all.push_back(session);
  return all;
}

void Sessions::watch() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    Clock::time_point next = Clock::now() + options_.lease;
    try {
      next = expire();
    } catch (const std::exception& error) {
      log::error(std::string("cannot end a session whose lease is over, and will try again: ") +
                 error.what());
    }
    if (!settled_ && Clock::now() >= start_ + 2 * options_.lease) {
      settled_ = true;
      lock.unlock();
      options_.settled();
      lock.lock();
    }
    closes_.wait_until(lock, next, [this] { return closing_; });
  }
}

Clock::time_point Sessions::expire() {
  const Clock::time_point now = Clock::now();
  Clock::time_point next = now + options_.lease;
  for (const auto& [id, session] : sessions_) {
    if (session->ended()) continue;
    const Clock::time_point over = session->seen() + options_.lease;
    if (over <= now) {
      options_.expired(session);
    } else {
      next = std::min(next, over);
    }
  }
  if (now >= start_ + options_.lease) {
    for (const auto& [id, absent] : absent_) records_.release_session(*absent.record);
    absent_.clear();
  }
  return next;
}

}  // namespace hbm::box::server
