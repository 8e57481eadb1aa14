// The stores of handles (bootstrap/handle.h). Each process that gives its handle to others serves a
// store. The members of the next group meet in the store of the first of them, which is then also
// the store of that group.
//
// Threads: one thread at a time uses a HandleStore. Any thread may call open_store(), and every
// function of a C10dMemberStore except setTimeout().
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "bootstrap/handle.h"
#include "bootstrap/key_value.h"
#include "bootstrap/member_store.h"

namespace hbm::process_group {

// A bootstrap::MemberStore for PyTorch. It has no queues and no listKeys(). A timeout of zero is no
// limit. Its functions raise DistNetworkError if the process that serves the store has ended, or
// in a forked child; DistStoreError at the timeout; and ValueError for a wrong question.
class C10dMemberStore final : public c10d::Store {
 public:
  // `name`: of the store, for errors.
  C10dMemberStore(std::shared_ptr<bootstrap::MemberStore> store, std::string name, bool served_here)
      : store_(std::move(store)), name_(std::move(name)), served_here_(served_here) {}

  const std::shared_ptr<bootstrap::MemberStore>& store() const noexcept { return store_; }
  const std::string& name() const noexcept { return name_; }
  bool served_here() const noexcept { return served_here_; }

  // Returns a store with the same connection and timeout. Waits of one do not block the other.
  c10::intrusive_ptr<c10d::Store> clone() override;

  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override { return multiGet({key}).front(); }
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  bool hasExtendedApi() const override { return true; }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  using Deadline = bootstrap::KeyValue::Deadline;

  template <typename Question>
  auto ask(const Question& question);
  // `keys`: those that the caller waits for, for errors.
  template <typename Question>
  auto ask(const Question& question, Deadline deadline, const std::string& keys = "");
  // Calls `found` until it returns true. Throws at the deadline. `found` asks the store, which has
  // a second for each answer even if the deadline is earlier.
  void await(const std::vector<std::string>& keys, Deadline deadline,
             const std::function<bool(Deadline answer_by)>& found);

  const std::shared_ptr<bootstrap::MemberStore> store_;
  const std::string name_;
  const bool served_here_;
};

class HandleStore {
 public:
  // Starts to serve a store on all addresses of this machine, at one of chosen_ports(). Throws
  // Error(kUnavailable) if that is impossible, Error(kInvalid) for a wrong environment.
  HandleStore();

  const bootstrap::Handle& handle() const noexcept { return handle_; }

  // Ends with its last reference.
  const c10::intrusive_ptr<c10d::Store>& store() const noexcept { return store_; }

 private:
  bootstrap::Handle handle_;
  c10::intrusive_ptr<c10d::Store> store_;
};

// Connects to the store of another process' handle, at the first of its addresses that leads there.
// Throws Error(kDeath) if that process has ended on this machine, Error(kNetwork) if no address
// leads to the store, and Error(kTimeout) at the deadline. `what` begins the texts.
c10::intrusive_ptr<c10d::Store> open_store(const bootstrap::Handle& handle, const std::string& what,
                                           bootstrap::KeyValue::Deadline deadline);

}  // namespace hbm::process_group
