// A key-value store that one process serves to the members of its groups. Another process needs the
// store's addresses, port and password to reach it.
//
// Nothing here resolves a name or prints, and only await() waits for keys. PyTorch's TCPStore
// resolves the name of each client, which takes seconds if a name server is slow, and prints when
// its server ends.
//
// Threads: any thread may call every function.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/key_value.h"

namespace hbm::bootstrap {

// A process' access to a store. Each function throws
//
// - Error(kNetwork) if the process that serves the store has ended, also later;
// - StoreError(kTimeout) without an answer before the deadline. Unless never_asked is true, the
//   store may still answer the question later;
// - Error(kInvalid) if the question is wrong, or if it or its answer has more than 64 MiB;
// - Error(kUnavailable) in a forked child.
class MemberStore {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  virtual ~MemberStore() = default;

  void set(const std::string& key, const std::string& value, Deadline deadline);

  // Returns the value of each key, or nothing for a key that is absent now.
  std::vector<std::optional<std::string>> get(const std::vector<std::string>& keys,
                                              Deadline deadline);

  // Returns true if all keys are present now.
  bool has(const std::vector<std::string>& keys, Deadline deadline);

  // Adds to the decimal number under the key (absent: 0) and returns the sum. Throws
  // Error(kInvalid) if the value is no number, or the sum does not fit.
  int64_t add(const std::string& key, int64_t amount, Deadline deadline);

  // Appends to the value of the key (absent: an empty value).
  void append(const std::string& key, const std::string& more, Deadline deadline);

  // Sets the key to `desired` if its value is `expected`, or if it is absent and `expected` is
  // empty. Returns the value that the key then has; `expected` if it is absent then.
  std::string replace(const std::string& key, const std::string& expected,
                      const std::string& desired, Deadline deadline);

  // Returns the number of keys that were present.
  int64_t remove(const std::vector<std::string>& keys, Deadline deadline);

  // Returns the number of keys.
  int64_t count(Deadline deadline);

  // Waits for the awaited state, for `longest` or an hour at most. Returns true if the store is in
  // it. Returns false immediately if another thread waits to ask.
  bool await(const Awaited& awaited, std::chrono::microseconds longest, Deadline deadline);

  using Message = std::vector<std::string>;

 private:
  // Returns the answer to a question: its error, empty if there is none, and the results.
  virtual Message answer(const Message& question, Deadline deadline) = 0;

  Message ask(const Message& question, Deadline deadline);
};

// Serves a new store on all addresses of this machine, until the last reference to the result is
// gone. Sets `port`, one of chosen_ports(). Throws Error(kUnavailable) if that is impossible.
std::shared_ptr<MemberStore> serve_member_store(const std::string& password, uint16_t& port);

// Connects to a store. Tries all addresses together, and takes the one that answers first. Calls
// `check` at least a hundred times a second; an exception of `check` ends the attempt. Throws
// Error(kNetwork), with the failure at each address, if none leads there, and Error(kTimeout) at
// the deadline.
std::shared_ptr<MemberStore> open_member_store(const std::vector<std::string>& addresses,
                                               uint16_t port, const std::string& password,
                                               MemberStore::Deadline deadline,
                                               const std::function<void()>& check = {});

}  // namespace hbm::bootstrap
