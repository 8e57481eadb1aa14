#include "process_group/store_connection.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "base/background_thread.h"
#include "base/descriptor.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/threads.h"

namespace hbm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using StorePointer = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds kOpenPatience{200};  // before PyTorch's own connection is asked
constexpr rlim_t kFewDescriptors = 8;

struct PrefixReader : c10d::PrefixStore {
  static const std::string& prefix(c10d::PrefixStore& store) {
    return store.*(&PrefixReader::prefix_);
  }
};

// Takes the PrefixStores off, and returns what they put before a key.
std::string strip_prefixes(StorePointer& store) {
  std::string prefix;
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    prefix.insert(0, PrefixReader::prefix(*prefixed) + "/");
    store = prefixed->getUnderlyingStore();
  }
  return prefix;
}

// A store, as errors name it, and who serves it.
struct StoreName {
  std::string store;
  std::string host;
};

StoreName name_of(c10d::Store& store) {
  const auto* const tcp = dynamic_cast<c10d::TCPStore*>(&store);
  if (tcp == nullptr) return {"the c10d store", "whoever serves it"};
  return {"the c10d store at " + tcp->getHost() + ":" + std::to_string(tcp->getPort()),
          "the process that serves it (rank 0, unless it is torchrun's agent)"};
}

std::string cause_of(const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  return torch != nullptr ? torch->what_without_backtrace() : error.what();
}

// Says so if this process has no descriptors left, which accounts for much.
std::string shortage_of_descriptors() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const Descriptor probe(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));
  bool few = !probe && errno == EMFILE;
  if (!few) {
    std::error_code none;
    const std::filesystem::directory_iterator files("/proc/self/fd", none);
    const auto open = none ? 0 : std::distance(begin(files), end(files));
    few = static_cast<rlim_t>(open) + kFewDescriptors >= limit.rlim_cur;
  }
  if (!few) return {};
  return "; this process has too many open files for its limit of " +
         std::to_string(limit.rlim_cur) + " (raise ulimit -n)";
}

class StoreConnection final : public KeyValue {
 public:
  // `original` is PyTorch's store.
  explicit StoreConnection(StorePointer original)
      : original_(std::move(original)),
        state_(std::make_shared<StoreThread>(name_of(*original_))),
        thread_([state = state_, store = original_]() mutable { state->serve(std::move(store)); },
                [state = state_] { state->stop(); }) {}

  // Waits until the clone is connected. A clone of a store that has gone would try for minutes; so
  // PyTorch's own connection, which is open, is asked meanwhile.
  void open(Deadline deadline) {
    while (!state_->opened(std::min(deadline, steady_clock::now() + kOpenPatience))) {
      if (steady_clock::now() >= deadline) state_->silent();
      ask_original(std::min(deadline, steady_clock::now() + kOpenPatience));
    }
  }

  void set(const std::string& key, const std::string& value, Deadline deadline) override {
    run([key, value](c10d::Store& store) { store.set(key, value); }, deadline);
  }

  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    return ask<std::optional<std::string>>(
        [key](c10d::Store& store) -> std::optional<std::string> {
          if (!store.check({key})) return std::nullopt;
          return store.get_to_str(key);
        },
        deadline);
  }

  std::vector<std::string> get_all(const std::vector<std::string>& keys,
                                   Deadline deadline) override {
    return ask<std::vector<std::string>>(
        [keys](c10d::Store& store) {
          std::vector<std::string> values;
          for (const std::vector<uint8_t>& value : store.multiGet(keys)) {
            values.emplace_back(value.begin(), value.end());
          }
          return values;
        },
        deadline);
  }

  bool has(const std::vector<std::string>& keys, Deadline deadline) override {
    return ask<bool>([keys](c10d::Store& store) { return store.check(keys); }, deadline);
  }

  long add(const std::string& key, long amount, Deadline deadline) override {
    return ask<long>([key, amount](c10d::Store& store) { return store.add(key, amount); },
                     deadline);
  }

 private:
  using Call = std::function<void(c10d::Store&)>;

  struct StoreRequest {
    Call call;
    bool done = false;
    bool abandoned = false;
    std::exception_ptr error;
  };

  // What the thread and the callers share.
  struct StoreThread {
    const StoreName name;

    std::mutex mutex;  // guards the members below; never held while the store is asked
    std::condition_variable to_do;
    std::condition_variable done;
    std::deque<std::shared_ptr<StoreRequest>> requests;
    bool is_open = false;
    bool stopping = false;
    std::string failure;  // why there is no connection; empty: none yet

    explicit StoreThread(StoreName store_name) : name(std::move(store_name)) {}

    void serve(StorePointer original) {
      StorePointer store;
      try {
        store = original->clone();
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        failure = cause_of(error);
      }
      original.reset();
      std::unique_lock lock(mutex);
      is_open = true;
      done.notify_all();
      while (!stopping) {
        if (requests.empty()) {
          to_do.wait(lock);
          continue;
        }
        const std::shared_ptr<StoreRequest> request = requests.front();
        requests.pop_front();
        if (request->abandoned) continue;
        std::string broken = failure;
        lock.unlock();
        std::exception_ptr error;
        try {
          if (!broken.empty()) gone(broken);
          request->call(*store);
        } catch (const Error&) {
          error = std::current_exception();
        } catch (const std::exception& other) {
          error = std::make_exception_ptr(Error(ErrorKind::kNetwork, gone_text(cause_of(other))));
        }
        lock.lock();
        request->error = error;
        request->done = true;
        done.notify_all();
      }
      done.notify_all();
      lock.unlock();
      store.reset();
    }

    void stop() {
      const std::lock_guard lock(mutex);
      stopping = true;
      to_do.notify_all();
      done.notify_all();
    }

    // Whether the thread has a connection, or has failed to get one (which throws), by `until`.
    bool opened(Deadline until) {
      std::unique_lock lock(mutex);
      if (!done.wait_until(lock, until, [this] { return is_open || stopping; })) return false;
      if (!failure.empty()) gone(failure);
      return true;
    }

    void run(const std::shared_ptr<StoreRequest>& request, Deadline deadline) {
      std::unique_lock lock(mutex);
      requests.push_back(request);
      to_do.notify_one();
      const bool woken = done.wait_until(lock, deadline, [&] { return request->done || stopping; });
      if (request->done && request->error) std::rethrow_exception(request->error);
      if (request->done) return;
      request->abandoned = true;
      lock.unlock();
      if (woken)
        throw Error(ErrorKind::kAborted, name.store + " was asked while this process ends");
      silent();
    }

    std::string gone_text(const std::string& cause) const {
      return name.store + " is gone: " + name.host + " has ended or refuses connections" +
             shortage_of_descriptors() + " (" + cause + ")";
    }

    [[noreturn]] void gone(const std::string& cause) const {
      throw Error(ErrorKind::kNetwork, gone_text(cause));
    }

    [[noreturn]] void silent() const {
      throw Error(ErrorKind::kTimeout,
                  name.store + " did not answer before the timeout: " + name.host +
                      " is stopped, has no open files left (ulimit -n), or cannot be reached" +
                      shortage_of_descriptors());
    }
  };

  void ask_original(Deadline until) {
    try {
      run_abandonable([original = original_] { original->check({"hbm/alive"}); }, until);
    } catch (const std::exception& error) {
      state_->gone(cause_of(error));
    }
  }

  void run(Call call, Deadline deadline) {
    fork_.require_owner("use its parent's connection to the c10d store");
    auto request = std::make_shared<StoreRequest>();
    request->call = std::move(call);
    state_->run(request, deadline);
  }

  // The answer belongs to the request, which may outlive the caller's patience.
  template <typename Answer>
  Answer ask(std::function<Answer(c10d::Store&)> question, Deadline deadline) {
    const auto answer = std::make_shared<Answer>();
    run([question, answer](c10d::Store& store) { *answer = question(store); }, deadline);
    return *answer;
  }

  const ForkGuard fork_;
  const StorePointer original_;
  const std::shared_ptr<StoreThread> state_;
  BackgroundThread thread_;
};

// The connections of this process.
struct Connections {
  std::mutex mutex;  // guards what follows; held while one is looked up, not while it opens
  std::map<const c10d::Store*, std::weak_ptr<StoreConnection>> by_store;

  std::shared_ptr<StoreConnection> find(const StorePointer& store) {
    const std::lock_guard lock(mutex);
    std::erase_if(by_store, [](const auto& entry) { return entry.second.expired(); });
    auto& known = by_store[store.get()];
    std::shared_ptr<StoreConnection> found = known.lock();
    if (!found) known = found = std::make_shared<StoreConnection>(store);
    return found;
  }
};

}  // namespace

GroupStore connect_store(const StorePointer& store, KeyValue::Deadline deadline) {
  StorePointer below = store;
  const std::string prefix = strip_prefixes(below);
  const auto connection = per_process<Connections>().find(below);
  connection->open(deadline);
  return {std::make_shared<PrefixedKeyValue>(connection, prefix), connection};
}

}  // namespace hbm
