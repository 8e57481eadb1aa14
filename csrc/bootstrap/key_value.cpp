#include "bootstrap/key_value.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/interruption.h"
#include "base/process_end.h"
#include "bootstrap/tuning.h"

namespace hbm::bootstrap {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

}  // namespace

std::vector<std::string> KeyValue::get_all(const std::vector<std::string>& keys,
                                           Deadline deadline) {
  std::vector<std::string> values;
  for (const std::string& key : keys) values.push_back(get(key, deadline).value());
  return values;
}

void KeyValue::await_change(const Awaited& /*awaited*/, microseconds pause,
                            microseconds /*longest*/) {
  std::this_thread::sleep_for(pause);
}

namespace {

bool await_with_pauses(KeyValue& store, const Awaited& awaited,
                       const std::function<bool(KeyValue::Deadline answer_by)>& found,
                       microseconds longest, KeyValue::Deadline deadline,
                       const std::function<void()>& check, KeyValue::Deadline answer) {
  const auto begin = steady_clock::now();
  auto next_pause_ends = begin;
  for (microseconds pause = kFirstQuestionPause;; pause = std::min(pause * 3 / 2, longest)) {
    park_at_process_end();
    const auto answer_by = std::max({deadline, answer, steady_clock::now() + kStoreAnswerTimeout});
    if (found(answer_by)) return true;
    try {
      if (check) check();
    } catch (const Error&) {
      if (found(answer_by)) return true;  // the answer came before the error
      throw;
    }
    const auto now = steady_clock::now();
    if (now >= deadline) return false;
    if (now - begin >= 3 * longest) {  // a long wait: check for Ctrl-C too
      if (const std::exception_ptr why = interruption()) std::rethrow_exception(why);
    }
    // The store may be in the awaited state although `found` returns false: the step is spoilt.
    // Then await_change() returns immediately.
    std::this_thread::sleep_until(std::min(next_pause_ends, deadline));
    next_pause_ends = now + pause;
    const auto left = std::max(microseconds(0), std::chrono::ceil<microseconds>(deadline - now));
    store.await_change(awaited, std::min(pause, left), std::min(longest, left));
  }
}

}  // namespace

bool await_answer(KeyValue& store, const Awaited& awaited,
                  const std::function<bool(KeyValue::Deadline answer_by)>& found,
                  KeyValue::Deadline deadline, const std::function<void()>& check,
                  KeyValue::Deadline answer) {
  return await_with_pauses(store, awaited, found, kLongestQuestionPause, deadline, check, answer);
}

bool await_keys(KeyValue& store, const std::vector<std::string>& keys, KeyValue::Deadline deadline,
                const std::function<void()>& check, KeyValue::Deadline answer) {
  const microseconds longest =
      std::max(kLongestQuestionPause, kPausePerKey * static_cast<int64_t>(keys.size()));
  const auto found = [&](KeyValue::Deadline answer_by) { return store.has(keys, answer_by); };
  return await_with_pauses(store, {keys}, found, longest, deadline, check, answer);
}

std::optional<std::string> await_value(KeyValue& store, const std::string& key,
                                       KeyValue::Deadline deadline,
                                       const std::function<void()>& check,
                                       KeyValue::Deadline answer) {
  std::optional<std::string> value;
  const auto found = [&](KeyValue::Deadline answer_by) {
    value = store.get(key, answer_by);
    return value.has_value();
  };
  await_answer(store, {{key}}, found, deadline, check, answer);
  return value;
}

PrefixedKeyValue::PrefixedKeyValue(std::shared_ptr<KeyValue> store, std::string prefix)
    : store_(std::move(store)), prefix_(std::move(prefix)) {}

void PrefixedKeyValue::set(const std::string& key, const std::string& value, Deadline deadline) {
  store_->set(prefix_ + key, value, deadline);
}

std::optional<std::string> PrefixedKeyValue::get(const std::string& key, Deadline deadline) {
  return store_->get(prefix_ + key, deadline);
}

std::vector<std::string> PrefixedKeyValue::get_all(const std::vector<std::string>& keys,
                                                   Deadline deadline) {
  return store_->get_all(prefixed(keys), deadline);
}

bool PrefixedKeyValue::has(const std::vector<std::string>& keys, Deadline deadline) {
  return store_->has(prefixed(keys), deadline);
}

long PrefixedKeyValue::add(const std::string& key, long amount, Deadline deadline) {
  return store_->add(prefix_ + key, amount, deadline);
}

std::string PrefixedKeyValue::claim(const std::string& key, const std::string& value,
                                    Deadline deadline) {
  return store_->claim(prefix_ + key, value, deadline);
}

void PrefixedKeyValue::remove(const std::vector<std::string>& keys) noexcept {
  store_->remove(prefixed(keys));
}

void PrefixedKeyValue::await_change(const Awaited& awaited, microseconds pause,
                                    microseconds longest) {
  store_->await_change({prefixed(awaited.keys), awaited.least}, pause, longest);
}

std::vector<std::string> PrefixedKeyValue::prefixed(const std::vector<std::string>& keys) const {
  std::vector<std::string> all;
  for (const std::string& key : keys) all.push_back(prefix_ + key);
  return all;
}

WatchedKeyValue::WatchedKeyValue(std::shared_ptr<KeyValue> store, std::function<void()> check)
    : store_(std::move(store)), check_(std::move(check)) {}

template <typename Question>
auto WatchedKeyValue::ask(const Question& question, Deadline deadline) {
  for (auto silence = kFirstStoreSilence;; silence *= 2) {
    try {
      return question(std::min(deadline, steady_clock::now() + silence));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout || steady_clock::now() >= deadline) throw;
    }
    check_();
  }
}

void WatchedKeyValue::set(const std::string& key, const std::string& value, Deadline deadline) {
  ask([&](Deadline until) { store_->set(key, value, until); }, deadline);
}

std::optional<std::string> WatchedKeyValue::get(const std::string& key, Deadline deadline) {
  return ask([&](Deadline until) { return store_->get(key, until); }, deadline);
}

bool WatchedKeyValue::has(const std::vector<std::string>& keys, Deadline deadline) {
  return ask([&](Deadline until) { return store_->has(keys, until); }, deadline);
}

long WatchedKeyValue::add(const std::string& key, long amount, Deadline deadline) {
  return store_->add(key, amount, deadline);
}

std::string WatchedKeyValue::claim(const std::string& key, const std::string& value,
                                   Deadline deadline) {
  return ask([&](Deadline until) { return store_->claim(key, value, until); }, deadline);
}

void WatchedKeyValue::remove(const std::vector<std::string>& keys) noexcept {
  store_->remove(keys);
}

void WatchedKeyValue::await_change(const Awaited& awaited, microseconds pause,
                                   microseconds longest) {
  store_->await_change(awaited, pause, longest);
}

}  // namespace hbm::bootstrap
