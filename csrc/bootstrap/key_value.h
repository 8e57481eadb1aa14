// The interface of a key-value store that the ranks share, for group formation. The process group
// implements it by a c10d store, MemberKeyValue by a member's store, native tests by a map.
//
// Threads: all functions may be called from any thread. One connection serves all threads of a
// process. So no call waits in the store for long: await_keys() repeats its question.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace hbm::bootstrap {

// An unanswered question to the store. The text names the store.
struct StoreError : Error {
  using Error::Error;
  bool was_removed = false;  // the store was a file, now removed; the other ranks may live
  bool never_asked = false;  // the store did not get the question, and will not get it
};

// The process that serves a store. The store ends with that process.
enum class StoreServer {
  kThisProcess,
  kAnotherRank,  // or an unknown process
  kNoRank,       // torchrun's agent or a file, which outlives the ranks
};

// The awaited state of a store, for which a caller waits: all keys are present and, with `least`,
// their values are numbers of at least that size.
struct Awaited {
  std::vector<std::string> keys;
  std::optional<long> least = {};
};

// Each question has a deadline for its answer. StoreError(kTimeout) says that the store did not
// answer, StoreError(kNetwork) that the store is gone.
class KeyValue {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  virtual ~KeyValue() = default;

  virtual void set(const std::string& key, const std::string& value, Deadline deadline) = 0;

  // Returns the value, or nothing if the key is absent now.
  virtual std::optional<std::string> get(const std::string& key, Deadline deadline) = 0;

  // Returns the values of keys, in the order of the keys. REQUIRES: has(keys). Asks for one key
  // after the other; a subclass may ask for all keys together.
  virtual std::vector<std::string> get_all(const std::vector<std::string>& keys, Deadline deadline);

  // Returns true if all keys are present now.
  virtual bool has(const std::vector<std::string>& keys, Deadline deadline) = 0;

  // Adds to the integer under the key (absent: 0) and returns the sum.
  virtual long add(const std::string& key, long amount, Deadline deadline) = 0;

  // Sets the key if it is absent, atomically. Returns the value that the key then has.
  virtual std::string claim(const std::string& key, const std::string& value,
                            Deadline deadline) = 0;

  // Removes keys that no process will read. Ignores absent keys. Waits 200 ms at most: a slow store
  // removes the keys later. If the store cannot remove keys, they stay, and a line of the log says
  // so at level debug.
  virtual void remove(const std::vector<std::string>& keys) noexcept = 0;

  // Called between two questions of a wait. Sleeps for `pause`. A store that can notify its clients
  // may instead wait for the awaited state, for `longest` at most.
  virtual void await_change(const Awaited& awaited, std::chrono::microseconds pause,
                            std::chrono::microseconds longest);
};

// Calls `found` repeatedly until it returns true; returns false at the deadline. `found` asks the
// store, and throws if the store does not answer by `answer_by`: the latest of `deadline`, `answer`
// and a second after the question. It returns true only if the store is in the awaited state. Runs
// `check` between the calls. If `check` throws an Error, calls `found` once more: returns true if
// `found` does, else rethrows the Error. Any other exception of `check` ends the wait immediately.
// Ctrl-C also ends a long wait.
bool await_answer(KeyValue& store, const Awaited& awaited,
                  const std::function<bool(KeyValue::Deadline answer_by)>& found,
                  KeyValue::Deadline deadline, const std::function<void()>& check = {},
                  KeyValue::Deadline answer = {});

// Waits as await_answer() does until all keys are present.
bool await_keys(KeyValue& store, const std::vector<std::string>& keys, KeyValue::Deadline deadline,
                const std::function<void()>& check = {}, KeyValue::Deadline answer = {});

// Waits as await_answer() does for the value of a key, and returns the value; nothing at the
// deadline.
std::optional<std::string> await_value(KeyValue& store, const std::string& key,
                                       KeyValue::Deadline deadline,
                                       const std::function<void()>& check = {},
                                       KeyValue::Deadline answer = {});

// A view of the keys of a store that begin with a prefix. The view's names lack the prefix.
class PrefixedKeyValue final : public KeyValue {
 public:
  PrefixedKeyValue(std::shared_ptr<KeyValue> store, std::string prefix);

  void set(const std::string& key, const std::string& value, Deadline deadline) override;
  std::optional<std::string> get(const std::string& key, Deadline deadline) override;
  std::vector<std::string> get_all(const std::vector<std::string>& keys,
                                   Deadline deadline) override;
  bool has(const std::vector<std::string>& keys, Deadline deadline) override;
  long add(const std::string& key, long amount, Deadline deadline) override;
  std::string claim(const std::string& key, const std::string& value, Deadline deadline) override;
  void remove(const std::vector<std::string>& keys) noexcept override;
  void await_change(const Awaited& awaited, std::chrono::microseconds pause,
                    std::chrono::microseconds longest) override;

 private:
  std::vector<std::string> prefixed(const std::vector<std::string>& keys) const;

  const std::shared_ptr<KeyValue> store_;
  const std::string prefix_;
};

// A view of a store that runs `check` while an answer is outstanding: after a quarter of a second
// (kFirstStoreSilence) without an answer. Then it asks again and waits twice as long, and so on
// until the deadline. `check` throws to end the wait.
class WatchedKeyValue final : public KeyValue {
 public:
  WatchedKeyValue(std::shared_ptr<KeyValue> store, std::function<void()> check);

  void set(const std::string& key, const std::string& value, Deadline deadline) override;
  std::optional<std::string> get(const std::string& key, Deadline deadline) override;
  bool has(const std::vector<std::string>& keys, Deadline deadline) override;
  // Asks once, because a second question would add twice.
  long add(const std::string& key, long amount, Deadline deadline) override;
  std::string claim(const std::string& key, const std::string& value, Deadline deadline) override;
  void remove(const std::vector<std::string>& keys) noexcept override;
  void await_change(const Awaited& awaited, std::chrono::microseconds pause,
                    std::chrono::microseconds longest) override;

 private:
  template <typename Question>
  auto ask(const Question& question, Deadline deadline);

  const std::shared_ptr<KeyValue> store_;
  const std::function<void()> check_;
};

}  // namespace hbm::bootstrap
