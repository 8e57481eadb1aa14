#include "process_group/store_connection.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "base/background_thread.h"
#include "base/descriptor_limit.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/process_end.h"
#include "base/threads.h"
#include "bootstrap/member_key_value.h"
#include "bootstrap/tuning.h"
#include "process_group/handle_store.h"
#include "process_group/tuning.h"

namespace hbm::process_group {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using StorePointer = c10::intrusive_ptr<c10d::Store>;

// No key has this value. With a TCPStore, a compareSet() that replaces this value by itself returns
// the value of a key in one question. It returns this value if the key is absent. PyTorch's get()
// takes two questions, and waits for the key.
constexpr std::string_view kAbsent("\0hbm: absent", 12);

struct PrefixReader : c10d::PrefixStore {
  static const std::string& prefix(c10d::PrefixStore& store) {
    return store.*(&PrefixReader::prefix_);
  }
};

// Replaces `store` by the store inside its PrefixStores. Returns the prefix that they give to keys.
std::string strip_prefixes(StorePointer& store) {
  std::string prefix;
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    prefix.insert(0, PrefixReader::prefix(*prefixed) + "/");
    store = prefixed->getUnderlyingStore();
  }
  return prefix;
}

// The file of a FileStore. If the file is removed, PyTorch makes a new file, and each process
// continues to read at its offset in the old file. So a removed file counts as a lost store.
class WatchedFile {
 public:
  explicit WatchedFile(std::string path) : path_(std::move(path)) {
    if (stat(path_.c_str(), &first_) != 0) first_ = {};
  }

  const std::string& path() const noexcept { return path_; }

  // Returns how the file was lost; empty if it is present.
  std::string loss() const {
    struct stat now{};
    if (stat(path_.c_str(), &now) != 0) return errno == ENOENT ? "the file was removed" : "";
    const bool same = now.st_dev == first_.st_dev && now.st_ino == first_.st_ino;
    return same ? "" : "another file has taken its place";
  }

 private:
  const std::string path_;
  struct stat first_{};
};

std::optional<WatchedFile> file_of(c10d::Store& store) {
  const auto* const file = dynamic_cast<c10d::FileStore*>(&store);
  if (file == nullptr) return std::nullopt;
  return WatchedFile(file->getPath());
}

// The store's name for errors, and the usual causes if it is gone or does not answer.
struct StoreName {
  std::string store;
  std::string gone;
  std::string silent;
};

StoreName name_of(c10d::Store& store) {
  constexpr const char* kServer =
      "the process that serves it (rank 0, unless it is torchrun's agent)";
  if (const auto* const tcp = dynamic_cast<c10d::TCPStore*>(&store)) {
    return {"the c10d store at " + tcp->getHost() + ":" + std::to_string(tcp->getPort()),
            std::string(kServer) + " has ended or refuses connections",
            std::string(kServer) +
                " is stopped, has no open files left (ulimit -n), or cannot be reached"};
  }
  if (const auto* const file = dynamic_cast<c10d::FileStore*>(&store)) {
    return {"the c10d store in the file " + file->getPath(), "the file cannot be read or written",
            "a process was killed while it wrote to the file, another one holds the file's lock, "
            "or the file system is stuck"};
  }
  return {"the c10d store", "it raised an error", "it is stuck"};
}

// Returns true if this process serves the store. Reads a private member for which PyTorch has no
// accessor: C++ lets an explicit instantiation name a private member.
bool has_server(const c10d::TCPStore& store);
template <auto Server>
struct ServerReader {
  friend bool has_server(const c10d::TCPStore& store) { return store.*Server != nullptr; }
};
template struct ServerReader<&c10d::TCPStore::server_>;

// Returns true if torchrun's agent serves the store that PyTorch's env:// uses.
bool is_served_by_agent(const c10d::TCPStore& store) {
  const auto is = [](const char* variable, const std::string& value) {
    const char* const found = std::getenv(variable);
    return found != nullptr && found == value;
  };
  return is("TORCHELASTIC_USE_AGENT_STORE", "True") &&
         is("MASTER_PORT", std::to_string(store.getPort()));
}

bootstrap::StoreServer server_of(c10d::Store& store) {
  const auto* const tcp = dynamic_cast<c10d::TCPStore*>(&store);
  if (tcp == nullptr) return bootstrap::StoreServer::kNoRank;
  if (has_server(*tcp)) return bootstrap::StoreServer::kThisProcess;
  return is_served_by_agent(*tcp) ? bootstrap::StoreServer::kNoRank
                                  : bootstrap::StoreServer::kAnotherRank;
}

std::string cause_of(const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  return torch != nullptr ? torch->what_without_backtrace() : error.what();
}

std::string claim_in(c10d::Store& store, const std::string& key, const std::string& value) {
  const std::vector<uint8_t> found =
      store.compareSet(key, {}, std::vector<uint8_t>(value.begin(), value.end()));
  return {found.begin(), found.end()};
}

class StoreConnection final : public bootstrap::KeyValue {
 public:
  // `original` is PyTorch's store.
  explicit StoreConnection(StorePointer original)
      : state_(std::make_shared<StoreThread>(std::move(original))),
        thread_([state = state_] { state->serve(); }, [state = state_] { state->stop(); }) {}

  // Between these two calls, PyTorch's own connection is used, unless the clone is open.
  void begin_forming() { state_->count_forming(1); }
  void end_forming() { state_->count_forming(-1); }

  void set(const std::string& key, const std::string& value, Deadline deadline) override {
    run("set", [key, value](c10d::Store& store) { store.set(key, value); }, deadline);
  }

  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    const auto in_one_question = [key](c10d::Store& store) -> std::optional<std::string> {
      const std::vector<uint8_t> absent(kAbsent.begin(), kAbsent.end());
      const std::vector<uint8_t> value = store.compareSet(key, absent, absent);
      // Another release may return an empty value for an absent key.
      if (value == absent || (value.empty() && !store.check({key}))) return std::nullopt;
      return std::string(value.begin(), value.end());
    };
    const auto in_several = [key](c10d::Store& store) -> std::optional<std::string> {
      if (!store.check({key})) return std::nullopt;
      return store.get_to_str(key);
    };
    using Value = std::optional<std::string>;
    return state_->is_tcp ? ask<Value>("get", in_one_question, deadline)
                          : ask<Value>("get", in_several, deadline);
  }

  std::vector<std::string> get_all(const std::vector<std::string>& keys,
                                   Deadline deadline) override {
    return ask<std::vector<std::string>>(
        "get",
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
    return ask<bool>("check", [keys](c10d::Store& store) { return store.check(keys); }, deadline);
  }

  long add(const std::string& key, long amount, Deadline deadline) override {
    return ask<long>(
        "add", [key, amount](c10d::Store& store) { return store.add(key, amount); }, deadline);
  }

  std::string claim(const std::string& key, const std::string& value, Deadline deadline) override {
    return ask<std::string>(
        "compare_set", [key, value](c10d::Store& store) { return claim_in(store, key, value); },
        deadline);
  }

  // Does not open the clone, because an ending group would use it only here.
  void remove(const std::vector<std::string>& keys) noexcept override {
    if (keys.empty()) return;
    begin_forming();
    try {
      run(
          "delete_key",
          [keys](c10d::Store& store) {
            for (const std::string& key : keys) store.deleteKey(key);
          },
          steady_clock::now() + bootstrap::kKeyRemovalTimeout, /*even_late=*/true);
    } catch (const std::exception& error) {
      log::debug(std::string("keys stay in the store: ") + error.what());
    }
    end_forming();
  }

 private:
  using Call = std::function<void(c10d::Store&)>;

  struct StoreRequest {
    const char* name;  // of PyTorch's function, for errors
    Call call;
    bool even_late = false;  // run even if the caller has stopped waiting
    bool begun = false;      // the store is being asked, or has been asked
    bool done = false;
    bool abandoned = false;
    std::exception_ptr error;
  };

  struct Asked {
    std::atomic<bool>& asking;
    ~Asked() { asking = false; }
  };

  // State shared by the thread and the callers.
  struct StoreThread : std::enable_shared_from_this<StoreThread> {
    const StorePointer original;
    const StoreName name;
    const bool is_tcp = dynamic_cast<c10d::TCPStore*>(original.get()) != nullptr;
    const std::optional<WatchedFile> file = file_of(*original);

    std::mutex mutex;  // guards the members below; never held while the store is asked
    std::condition_variable to_do;
    std::condition_variable done;
    std::deque<std::shared_ptr<StoreRequest>> requests;
    int groups_forming = 0;
    StorePointer clone;
    bool opening = false;  // the clone is being opened, on a thread of its own
    steady_clock::time_point opens_again;

    std::atomic<bool> asking{false};  // the original is being asked, on a thread of its own
    bool stopping = false;

    explicit StoreThread(StorePointer store)
        : original(std::move(store)), name(name_of(*original)) {}

    void count_forming(int change) {
      const std::lock_guard lock(mutex);
      groups_forming += change;
      to_do.notify_all();
    }

    // Returns the store for the next call. Only the connection's thread calls it. The clone of a
    // TCPStore may take minutes to open. Waits for the clone only while PyTorch's connection
    // answers and no group is being formed. A FileStore is never cloned, for two reasons. A caller
    // that waits in a FileStore holds no lock, so a clone would gain nothing. And cloning writes to
    // the file; a kill during the write would leave half a record.
    StorePointer connection() {
      if (!is_tcp) return original;
      std::unique_lock lock(mutex);
      auto next_check = steady_clock::now() + kStoreOpenTimeout;
      while (clone == nullptr && groups_forming == 0 && !stopping && opens_clone()) {
        if (to_do.wait_until(lock, next_check) == std::cv_status::no_timeout) continue;
        lock.unlock();
        ask_original();
        next_check = steady_clock::now() + kStoreOpenTimeout;
        lock.lock();
      }
      return clone != nullptr ? clone : original;
    }

    // Returns true if the clone is being opened. Starts opening it, unless that has failed
    // recently. REQUIRES: mutex is held.
    bool opens_clone() {
      if (opening || steady_clock::now() < opens_again) return opening;
      try {
        opening = true;
        run_abandonable([self = shared_from_this()] { self->open_clone(); }, steady_clock::now());
      } catch (const std::exception& error) {  // no thread could be started
        cannot_open(error);
      }
      return opening;
    }

    void open_clone() {
      StorePointer opened;
      std::unique_lock lock(mutex, std::defer_lock);
      try {
        opened = original->clone();
        lock.lock();
        opening = false;
        if (!stopping) clone = std::move(opened);
      } catch (const std::exception& error) {
        lock.lock();
        cannot_open(error);
      }
      to_do.notify_all();
    }

    // Falls back to the original, whose errors say more. REQUIRES: mutex is held.
    void cannot_open(const std::exception& error) {
      opening = false;
      opens_again = steady_clock::now() + kStoreReopenDelay;
      log::debug("no second connection to " + name.store + ": " + cause_of(error));
    }

    // Throws if the store is gone. Does nothing while an earlier question has no answer, because
    // other code may block the original for long.
    void ask_original() {
      if (asking.exchange(true)) return;
      const auto ask = [self = shared_from_this()] {
        const Asked end{self->asking};
        self->original->check({"hbm/alive"});
      };
      try {
        run_abandonable(ask, steady_clock::now() + kStoreOpenTimeout);
      } catch (const std::system_error&) {  // no thread could be started
        asking = false;
      }
    }

    void serve() {
      std::unique_lock lock(mutex);
      while (!stopping) {
        if (requests.empty()) {
          to_do.wait(lock);
          continue;
        }
        const std::shared_ptr<StoreRequest> request = requests.front();
        requests.pop_front();
        if (request->abandoned && !request->even_late) continue;
        lock.unlock();
        std::exception_ptr error;
        try {
          require_file(*request);
          const StorePointer store = connection();
          lock.lock();
          request->begun = !request->abandoned || request->even_late;
          lock.unlock();
          if (request->begun) request->call(*store);
        } catch (const Error&) {
          error = std::current_exception();
        } catch (const std::exception& other) {
          error = std::make_exception_ptr(bootstrap::StoreError(
              ErrorKind::kNetwork, name.store + " is gone: " + name.gone +
                                       (is_tcp ? shortage_of_descriptors() : "") + " (" +
                                       request->name + ": " + cause_of(other) + ")"));
        }
        lock.lock();
        request->error = error;
        request->done = true;
        done.notify_all();
      }
      done.notify_all();
      const StorePointer closed = std::move(clone);
      lock.unlock();
    }

    void stop() {
      const std::lock_guard lock(mutex);
      stopping = true;
      to_do.notify_all();
      done.notify_all();
    }

    void run(const std::shared_ptr<StoreRequest>& request, Deadline deadline) {
      std::unique_lock lock(mutex);
      requests.push_back(request);
      to_do.notify_one();
      const bool woken = done.wait_until(lock, deadline, [&] { return request->done || stopping; });
      if (request->done && request->error) std::rethrow_exception(request->error);
      if (request->done) return;
      request->abandoned = true;
      const bool never_asked = !request->begun && !request->even_late;
      lock.unlock();
      park_at_process_end();
      if (woken)
        throw Error(ErrorKind::kAborted, name.store + " was asked while this process ends");
      silent(*request, never_asked);
    }

    void require_file(const StoreRequest& request) const {
      const std::string loss = file ? file->loss() : "";
      if (loss.empty()) return;
      bootstrap::StoreError error(ErrorKind::kNetwork,
                                  name.store + " is gone: " + loss + " (" + request.name + ")");
      error.was_removed = true;
      throw error;
    }

    [[noreturn]] void silent(const StoreRequest& request, bool never_asked) const {
      bootstrap::StoreError error(
          ErrorKind::kTimeout,
          name.store + " did not answer before the timeout: " + name.silent +
              "; or another thread of this process waits in it while a group is "
              "being made" +
              shortage_of_descriptors() + " (" + request.name + ")");
      error.never_asked = never_asked;
      throw error;
    }
  };

  void run(const char* name, Call call, Deadline deadline, bool even_late = false) {
    fork_.require_owner("use its parent's connection to the c10d store");
    auto request = std::make_shared<StoreRequest>();
    request->name = name;
    request->call = std::move(call);
    request->even_late = even_late;
    state_->run(request, deadline);
  }

  // The request owns the answer, because the request may outlive the caller's wait.
  template <typename Answer>
  Answer ask(const char* name, std::function<Answer(c10d::Store&)> question, Deadline deadline) {
    const auto answer = std::make_shared<Answer>();
    run(name, [question, answer](c10d::Store& store) { *answer = question(store); }, deadline);
    return *answer;
  }

  const ForkGuard fork_;
  const std::shared_ptr<StoreThread> state_;
  BackgroundThread thread_;
};

class DirectStore final : public bootstrap::KeyValue {
  template <typename Question>
  auto ask(const Question& question) {
    try {
      return question();
    } catch (const std::exception& error) {
      throw Error(ErrorKind::kNetwork, cause_of(error));
    }
  }

 public:
  explicit DirectStore(StorePointer store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value, Deadline /*deadline*/) override {
    ask([&] { store_->set(key, value); });
  }
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    if (!has({key}, deadline)) return std::nullopt;
    return ask([&] { return store_->get_to_str(key); });
  }
  bool has(const std::vector<std::string>& keys, Deadline /*deadline*/) override {
    return ask([&] { return store_->check(keys); });
  }
  long add(const std::string& key, long amount, Deadline /*deadline*/) override {
    return ask([&]() -> long { return store_->add(key, amount); });
  }
  std::string claim(const std::string& key, const std::string& value,
                    Deadline /*deadline*/) override {
    return ask([&] { return claim_in(*store_, key, value); });
  }
  // Does nothing, because a process that fails to form its group has no keys to remove.
  void remove(const std::vector<std::string>& /*keys*/) noexcept override {}

 private:
  const StorePointer store_;
};

// The connections of this process.
struct Connections {
  template <typename Connection>
  using Known = std::map<const void*, std::weak_ptr<Connection>>;  // by the address of the store

  std::mutex mutex;  // guards the maps; held during a lookup, not while a connection opens
  Known<StoreConnection> by_store;
  Known<bootstrap::MemberKeyValue> by_member;

  std::shared_ptr<StoreConnection> find(const StorePointer& store) {
    return find_in(by_store, store.get(), store);
  }

  std::shared_ptr<bootstrap::MemberKeyValue> find(const C10dMemberStore& store) {
    return find_in(by_member, store.store().get(), store.store(), store.name());
  }

 private:
  // Makes the connection with `arguments` if it is not there.
  template <typename Connection, typename... Arguments>
  std::shared_ptr<Connection> find_in(Known<Connection>& known, const void* key,
                                      const Arguments&... arguments) {
    const std::lock_guard lock(mutex);
    std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
    auto& entry = known[key];
    std::shared_ptr<Connection> found = entry.lock();
    if (!found) entry = found = std::make_shared<Connection>(arguments...);
    return found;
  }
};

}  // namespace

GroupStore connect_store(const StorePointer& store) {
  StorePointer below = store;
  const std::string prefix = strip_prefixes(below);
  if (const auto* const member = dynamic_cast<C10dMemberStore*>(below.get())) {
    const auto keys = per_process<Connections>().find(*member);
    return {.group = std::make_shared<bootstrap::PrefixedKeyValue>(keys, prefix),
            .job = keys,
            .forming = nullptr,
            .server = member->served_here() ? bootstrap::StoreServer::kThisProcess
                                            : bootstrap::StoreServer::kAnotherRank,
            .by_handle = true};
  }
  const auto connection = per_process<Connections>().find(below);
  connection->begin_forming();
  return {
      .group = std::make_shared<bootstrap::PrefixedKeyValue>(connection, prefix),
      .job = connection,
      .forming = std::shared_ptr<void>(nullptr, [connection](void*) { connection->end_forming(); }),
      .server = server_of(*below)};
}

std::string key_prefix(const StorePointer& store) {
  StorePointer below = store;
  return strip_prefixes(below);
}

std::shared_ptr<bootstrap::KeyValue> connect_directly(const StorePointer& store) {
  return std::make_shared<DirectStore>(store);
}

}  // namespace hbm::process_group
