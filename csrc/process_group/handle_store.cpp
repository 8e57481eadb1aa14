#include "process_group/handle_store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/process_end.h"
#include "bootstrap/tuning.h"
#include "process_group/tuning.h"

namespace hbm::process_group {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr const char* kLoopback = "127.0.0.1";

bootstrap::KeyValue::Deadline deadline_after(milliseconds timeout) {
  constexpr auto kNever = bootstrap::KeyValue::Deadline::max();
  const auto now = steady_clock::now();
  const bool limited = timeout != c10d::Store::kNoTimeout &&
                       timeout < std::chrono::floor<milliseconds>(kNever - now);
  return limited ? now + timeout : kNever;
}

std::string joined(const std::vector<std::string>& keys) {
  std::string text;
  for (const std::string& key : keys) text += (text.empty() ? "" : ", ") + key;
  return text;
}

std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// Returns the addresses at which this process can reach the handle's store. 127.0.0.1 leads there
// only within one network. In one network every other address leads to the same store.
std::vector<std::string> ways_to(const bootstrap::Handle& handle) {
  if (handle.network == bootstrap::network_id()) return {kLoopback};
  std::vector<std::string> ways;
  for (const std::string& address : handle.addresses) {
    if (!address.starts_with("127.")) ways.push_back(address);
  }
  return ways;
}

std::string name_of(const bootstrap::Handle& handle) {
  return "the store of the handle of " + process_name(handle.process);
}

}  // namespace

template <typename Question>
auto C10dMemberStore::ask(const Question& question, Deadline deadline, const std::string& keys) {
  try {
    return question(deadline);
  } catch (const Error& error) {
    const std::string waiting = keys.empty() ? "" : ", in a wait for these keys: " + keys;
    const std::string text = name_ + ": " + error.what() + waiting;
    if (error.kind() == ErrorKind::kInvalid) C10_THROW_ERROR(ValueError, text);
    if (error.kind() == ErrorKind::kTimeout) C10_THROW_ERROR(DistStoreError, text);
    C10_THROW_ERROR(DistNetworkError, text);
  }
}

template <typename Question>
auto C10dMemberStore::ask(const Question& question) {
  return ask(question, deadline_after(timeout_));
}

c10::intrusive_ptr<c10d::Store> C10dMemberStore::clone() {
  auto made = c10::make_intrusive<C10dMemberStore>(store_, name_, served_here_);
  made->setTimeout(timeout_);
  return made;
}

void C10dMemberStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  ask([&](auto deadline) { store_->set(key, text_of(value), deadline); });
}

std::vector<uint8_t> C10dMemberStore::compareSet(const std::string& key,
                                                 const std::vector<uint8_t>& expected,
                                                 const std::vector<uint8_t>& desired) {
  return bytes_of(ask([&](auto deadline) {
    return store_->replace(key, text_of(expected), text_of(desired), deadline);
  }));
}

std::vector<std::vector<uint8_t>> C10dMemberStore::multiGet(const std::vector<std::string>& keys) {
  const Deadline deadline = deadline_after(timeout_);
  std::vector<std::vector<uint8_t>> values;
  await(keys, deadline, [&](Deadline answer_by) {
    values.clear();
    const auto found = ask([&](auto by) { return store_->get(keys, by); }, answer_by, joined(keys));
    for (const auto& value : found) {
      if (value) values.push_back(bytes_of(*value));
    }
    return values.size() == keys.size();
  });
  return values;
}

void C10dMemberStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  ask([&](auto deadline) { store_->append(key, text_of(value), deadline); });
}

int64_t C10dMemberStore::add(const std::string& key, int64_t value) {
  return ask([&](auto deadline) { return store_->add(key, value, deadline); });
}

bool C10dMemberStore::deleteKey(const std::string& key) {
  return ask([&](auto deadline) { return store_->remove({key}, deadline) == 1; });
}

bool C10dMemberStore::check(const std::vector<std::string>& keys) {
  return ask([&](auto deadline) { return store_->has(keys, deadline); });
}

int64_t C10dMemberStore::getNumKeys() {
  return ask([&](auto deadline) { return store_->count(deadline); });
}

void C10dMemberStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const Deadline deadline = deadline_after(timeout);
  await(keys, deadline, [&](Deadline answer_by) {
    return ask([&](auto by) { return store_->has(keys, by); }, answer_by, joined(keys));
  });
}

// Asks repeatedly, so that a wait does not hold the connection.
void C10dMemberStore::await(const std::vector<std::string>& keys, Deadline deadline,
                            const std::function<bool(Deadline answer_by)>& found) {
  auto pause = kFirstMemberStorePause;
  while (!found(std::max(deadline, steady_clock::now() + bootstrap::kStoreAnswerTimeout))) {
    if (steady_clock::now() >= deadline) {
      C10_THROW_ERROR(
          DistStoreError,
          name_ + ": not all of these keys were set before the timeout: " + joined(keys));
    }
    park_at_process_end();
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestMemberStorePause);
  }
}

HandleStore::HandleStore() : handle_(bootstrap::make_handle(0)) {
  uint16_t port = 0;
  auto served = bootstrap::serve_member_store(handle_.id, port);
  handle_.port = port;
  store_ = c10::make_intrusive<C10dMemberStore>(std::move(served), name_of(handle_),
                                                /*served_here=*/true);
}

c10::intrusive_ptr<c10d::Store> open_store(const bootstrap::Handle& handle, const std::string& what,
                                           bootstrap::KeyValue::Deadline deadline) {
  const std::string first = "rank 0 (" + process_name(handle.process) + ")";
  const auto require_alive = [&] {
    if (has_ended(handle.process)) throw Error(ErrorKind::kDeath, what + first + " has died");
  };
  try {
    auto opened = bootstrap::open_member_store(ways_to(handle), static_cast<uint16_t>(handle.port),
                                               handle.id, deadline, require_alive);
    return c10::make_intrusive<C10dMemberStore>(std::move(opened), name_of(handle),
                                                /*served_here=*/false);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kDeath) throw;
    require_alive();
    const std::string serves = " serves the store in which the members meet, and ";
    if (error.kind() == ErrorKind::kTimeout) {
      throw Error(ErrorKind::kTimeout, what + first + serves +
                                           "did not answer before the timeout: it is stopped, or "
                                           "unreachable (" +
                                           error.what() + ")");
    }
    throw Error(ErrorKind::kNetwork, what + first + serves + "cannot be reached (" + error.what() +
                                         "): it has died, or a firewall is between the machines");
  }
}

}  // namespace hbm::process_group
