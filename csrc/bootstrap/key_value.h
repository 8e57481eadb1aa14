// A key-value store shared by the ranks: what bootstrap needs of one. The process group puts a c10d
// store behind it; tests put a map behind it.
//
// Threads: all functions may be called from any thread. Nothing waits in the store: whoever waits
// for a key asks again and again (await_keys), so that one connection serves all of a process.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace hbm {

// A question to the store failed. Its text names the store.
struct StoreError : Error {
  using Error::Error;
  bool was_removed = false;  // true: the store was a file that was removed; its users may live
};

// The process that serves a store. The store ends with that process.
enum class StoreServer {
  kThisProcess,
  kAnotherRank,  // or a process that is not known
  kNoRank,       // torchrun's agent, or the store is a file: it outlives the ranks
};

// Each question has a deadline for its answer: StoreError(kTimeout) says that the store did not
// answer, StoreError(kNetwork) that it is gone.
class KeyValue {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  virtual ~KeyValue() = default;

  virtual void set(const std::string& key, const std::string& value, Deadline deadline) = 0;

  // The value, or nothing if the key is not there now.
  virtual std::optional<std::string> get(const std::string& key, Deadline deadline) = 0;

  // The values of keys, in their order. REQUIRES: has(keys). Asks for one after the other, where a
  // store has no better way.
  virtual std::vector<std::string> get_all(const std::vector<std::string>& keys, Deadline deadline);

  // Whether all keys are there now.
  virtual bool has(const std::vector<std::string>& keys, Deadline deadline) = 0;

  // Adds to the integer behind the key (absent: 0) and returns the sum.
  virtual long add(const std::string& key, long amount, Deadline deadline) = 0;

  // Sets an absent key, in one step of the store. Returns the value that is there afterwards.
  virtual std::string claim(const std::string& key, const std::string& value,
                            Deadline deadline) = 0;

  // Removes keys that no process reads any more; absent ones are passed over. Waits 200 ms at most:
  // a slow store removes them later. If the store cannot remove them, they stay, and the log says
  // so at level debug.
  virtual void remove(const std::vector<std::string>& keys) noexcept = 0;
};

// Asks until `found`, which asks a store and has until `patience` for the answer, returns true;
// false when the deadline came first. A store that does not answer throws at `answer`, or a second
// after the deadline if that is later. `check` is called between the looks, and ends the wait by
// what it throws.
bool await_answer(const std::function<bool(KeyValue::Deadline patience)>& found,
                  KeyValue::Deadline deadline, const std::function<void()>& check = {},
                  KeyValue::Deadline answer = {});

// Waits like that until all keys are there.
bool await_keys(KeyValue& store, const std::vector<std::string>& keys, KeyValue::Deadline deadline,
                const std::function<void()>& check = {}, KeyValue::Deadline answer = {});

// Waits like that for the value of a key, which it returns.
std::optional<std::string> await_value(KeyValue& store, const std::string& key,
                                       KeyValue::Deadline deadline,
                                       const std::function<void()>& check = {},
                                       KeyValue::Deadline answer = {});

// The keys of a store that begin with a prefix, by the rest of their names.
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

 private:
  std::vector<std::string> prefixed(const std::vector<std::string>& keys) const;

  const std::shared_ptr<KeyValue> store_;
  const std::string prefix_;
};

// A store whose user looks for what ends its wait while there is no answer. A question that has had
// none for a quarter of a second is asked again after `look`, with twice that patience, and so on
// until its deadline. `look` throws to end the wait.
class WatchedKeyValue final : public KeyValue {
 public:
  WatchedKeyValue(std::shared_ptr<KeyValue> store, std::function<void()> look);

  void set(const std::string& key, const std::string& value, Deadline deadline) override;
  std::optional<std::string> get(const std::string& key, Deadline deadline) override;
  bool has(const std::vector<std::string>& keys, Deadline deadline) override;
  // Asked once, as two answers would be two sums.
  long add(const std::string& key, long amount, Deadline deadline) override;
  std::string claim(const std::string& key, const std::string& value, Deadline deadline) override;
  void remove(const std::vector<std::string>& keys) noexcept override;

 private:
  template <typename Question>
  auto ask(const Question& question, Deadline deadline);

  const std::shared_ptr<KeyValue> store_;
  const std::function<void()> look_;
};

}  // namespace hbm
