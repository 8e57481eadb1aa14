#include "process_group/handle_store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "process_group/tuning.h"

namespace hbm::process_group {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr const char* kLoopback = "127.0.0.1";

bootstrap::KeyValue::Deadline deadline_after(milliseconds timeout) {
  return timeout == c10d::Store::kNoTimeout ? bootstrap::KeyValue::Deadline::max()
                                            : steady_clock::now() + timeout;
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
auto C10dMemberStore::ask(const Question& question) {
  try {
    return question(deadline_after(timeout_));
  } catch (const Error& error) {
    const std::string text = name_ + ": " + error.what();
    if (error.kind() == ErrorKind::kInvalid) C10_THROW_ERROR(ValueError, text);
    if (error.kind() == ErrorKind::kTimeout) C10_THROW_ERROR(DistStoreError, text);
    C10_THROW_ERROR(DistNetworkError, text);
  }
}

c10::intrusive_ptr<c10d::Store> C10dMemberStore::clone() {
  return c10::make_intrusive<C10dMemberStore>(store_, name_, served_here_);
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

std::vector<uint8_t> C10dMemberStore::get(const std::string& key) {
  return multiGet({key}).front();
}

std::vector<std::vector<uint8_t>> C10dMemberStore::multiGet(const std::vector<std::string>& keys) {
  const auto deadline = deadline_after(timeout_);
  while (true) {
    const auto found = ask([&](auto answer_by) { return store_->get(keys, answer_by); });
    std::vector<std::vector<uint8_t>> values;
    for (const auto& value : found) {
      if (value) values.push_back(bytes_of(*value));
    }
    if (values.size() == keys.size()) return values;
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    wait(keys, std::max(left, milliseconds(1)));
  }
}

int64_t C10dMemberStore::add(const std::string& key, int64_t value) {
  return ask([&](auto deadline) { return store_->add(key, value, deadline); });
}

bool C10dMemberStore::deleteKey(const std::string& key) {
  return ask([&](auto deadline) { return store_->remove(key, deadline); });
}

bool C10dMemberStore::check(const std::vector<std::string>& keys) {
  return ask([&](auto deadline) { return store_->has(keys, deadline); });
}

int64_t C10dMemberStore::getNumKeys() {
  return ask([&](auto deadline) { return store_->count(deadline); });
}

// Asks repeatedly, so that a wait does not hold the connection.
void C10dMemberStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const auto deadline = deadline_after(timeout);
  auto pause = kFirstMemberStorePause;
  while (!check(keys)) {
    if (steady_clock::now() >= deadline) {
      std::string names;
      for (const std::string& key : keys) names += (names.empty() ? "" : ", ") + key;
      C10_THROW_ERROR(DistStoreError, name_ + ": no value for all of the keys " + names +
                                          " before the timeout of " +
                                          std::to_string(timeout.count()) + " ms");
    }
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
