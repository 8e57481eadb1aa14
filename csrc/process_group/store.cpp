#include "process_group/store.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace hbm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

class StoreKeyValue final : public KeyValue {
 public:
  explicit StoreKeyValue(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    reported([&] { store_->set(key, value); });
  }

  std::optional<std::string> get(const std::string& key) override {
    return reported([&]() -> std::optional<std::string> {
      if (!store_->check({key})) return std::nullopt;
      return store_->get_to_str(key);
    });
  }

  bool wait(const std::vector<std::string>& keys, Deadline deadline) override {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    try {
      store_->wait(keys, std::max(left, milliseconds(1)));
      return true;
    } catch (const std::exception& error) {
      if (steady_clock::now() + milliseconds(10) >= deadline) return false;
      throw Error(ErrorKind::kNetwork, std::string("the c10d store failed: ") + error.what());
    }
  }

  long add(const std::string& key, long amount) override {
    return reported([&] { return store_->add(key, amount); });
  }

 private:
  template <typename Call>
  static auto reported(Call&& call) -> decltype(call()) {
    try {
      return call();
    } catch (const std::exception& error) {
      throw Error(ErrorKind::kNetwork, std::string("the c10d store failed: ") + error.what());
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

std::shared_ptr<KeyValue> make_key_value(const c10::intrusive_ptr<c10d::Store>& store) {
  return std::make_shared<StoreKeyValue>(store->clone());
}

}  // namespace hbm
