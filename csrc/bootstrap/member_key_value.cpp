#include "bootstrap/member_key_value.h"

#include <chrono>
#include <exception>
#include <thread>

#include "base/descriptor_limit.h"
#include "base/error.h"
#include "base/log.h"
#include "bootstrap/tuning.h"

namespace hbm::bootstrap {

// `question`: the function's name, for errors.
template <typename Question>
auto MemberKeyValue::ask(const char* question, const Question& act) const {
  try {
    return act(*store_);
  } catch (const Error& error) {
    const std::string cause =
        shortage_of_descriptors() + " (" + question + ": " + error.what() + ")";
    if (error.kind() == ErrorKind::kNetwork) {
      throw StoreError(ErrorKind::kNetwork, name_ + " is gone: that process has ended" + cause);
    }
    if (error.kind() != ErrorKind::kTimeout) throw;
    StoreError late(ErrorKind::kTimeout, name_ +
                                             " did not answer before the timeout: that process is "
                                             "stopped, or unreachable" +
                                             cause);
    const auto* const asked = dynamic_cast<const StoreError*>(&error);
    late.never_asked = asked != nullptr && asked->never_asked;
    throw late;
  }
}

void MemberKeyValue::set(const std::string& key, const std::string& value, Deadline deadline) {
  ask("set", [&](MemberStore& store) { store.set(key, value, deadline); });
}

std::optional<std::string> MemberKeyValue::get(const std::string& key, Deadline deadline) {
  return ask("get", [&](MemberStore& store) { return store.get({key}, deadline).at(0); });
}

std::vector<std::string> MemberKeyValue::get_all(const std::vector<std::string>& keys,
                                                 Deadline deadline) {
  std::vector<std::string> values;
  for (auto& value : ask("get", [&](MemberStore& store) { return store.get(keys, deadline); })) {
    values.push_back(std::move(value.value()));
  }
  return values;
}

bool MemberKeyValue::has(const std::vector<std::string>& keys, Deadline deadline) {
  return ask("has", [&](MemberStore& store) { return store.has(keys, deadline); });
}

long MemberKeyValue::add(const std::string& key, long amount, Deadline deadline) {
  return ask("add", [&](MemberStore& store) { return store.add(key, amount, deadline); });
}

std::string MemberKeyValue::claim(const std::string& key, const std::string& value,
                                  Deadline deadline) {
  return ask("replace",
             [&](MemberStore& store) { return store.replace(key, "", value, deadline); });
}

// The next question reports an error.
void MemberKeyValue::await_change(const Awaited& awaited, std::chrono::microseconds pause,
                                  std::chrono::microseconds longest) {
  const auto now = std::chrono::steady_clock::now();
  try {
    if (store_->await(awaited, longest, now + longest + kFirstStoreSilence)) return;
  } catch (const Error&) {
  }
  std::this_thread::sleep_until(now + pause);
}

void MemberKeyValue::remove(const std::vector<std::string>& keys) noexcept {
  if (keys.empty()) return;
  try {
    store_->remove(keys, std::chrono::steady_clock::now() + kKeyRemovalTimeout);
  } catch (const std::exception& error) {
    log::debug(name_ + ": keys stay in the store: " + error.what());
  }
}

}  // namespace hbm::bootstrap
