// The interface KeyValue over a member's store (bootstrap/member_store.h). The calling thread asks
// the store: a MemberStore answers or throws by the deadline, so no other thread is needed.
//
// Threads: any thread may call every function.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/key_value.h"
#include "bootstrap/member_store.h"

namespace hbm::bootstrap {

class MemberKeyValue final : public KeyValue {
 public:
  // `name`: of the store, for errors.
  MemberKeyValue(std::shared_ptr<MemberStore> store, std::string name)
      : store_(std::move(store)), name_(std::move(name)) {}

  // The functions of KeyValue. Each throws
  //
  // - StoreError(kNetwork) if the process that serves the store has ended;
  // - StoreError(kTimeout) without an answer before the deadline;
  // - other Errors as MemberStore's functions do.
  void set(const std::string& key, const std::string& value, Deadline deadline) override;
  std::optional<std::string> get(const std::string& key, Deadline deadline) override;
  std::vector<std::string> get_all(const std::vector<std::string>& keys,
                                   Deadline deadline) override;
  bool has(const std::vector<std::string>& keys, Deadline deadline) override;
  long add(const std::string& key, long amount, Deadline deadline) override;
  std::string claim(const std::string& key, const std::string& value, Deadline deadline) override;
  // The keys stay if other threads' questions take the connection for 200 ms.
  void remove(const std::vector<std::string>& keys) noexcept override;
  void await_change(const Awaited& awaited, std::chrono::microseconds pause,
                    std::chrono::microseconds longest) override;

 private:
  template <typename Question>
  auto ask(const char* question, const Question& act) const;

  const std::shared_ptr<MemberStore> store_;
  const std::string name_;
};

}  // namespace hbm::bootstrap
