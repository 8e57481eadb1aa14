#include "bootstrap/member_store.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/background_thread.h"
#include "base/descriptor.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/process_end.h"
#include "base/tcp.h"
#include "base/unshared_socket.h"
#include "bootstrap/tuning.h"

namespace hbm::bootstrap {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using Deadline = MemberStore::Deadline;
using Message = MemberStore::Message;

// -- Messages on the wire: the size of the rest, then for each text its size and its bytes. A size
// has four bytes, the lowest first.

constexpr size_t kSizeBytes = 4;
constexpr size_t kLongestMessage = size_t{64} << 20;
constexpr size_t kLongestGreeting = 1024;
constexpr const char* kTooLong = "a store's question or answer of more than 64 MiB";

void append_size(std::string& bytes, size_t size) {
  for (size_t i = 0; i < kSizeBytes; ++i) bytes += static_cast<char>(size >> (8 * i) & 0xff);
}

size_t read_size(std::string_view bytes) {
  size_t size = 0;
  for (size_t i = kSizeBytes; i-- > 0;) size = size << 8 | static_cast<unsigned char>(bytes[i]);
  return size;
}

std::string encode(const Message& message) {
  std::string texts;
  for (const std::string& text : message) {
    append_size(texts, text.size());
    texts += text;
  }
  std::string bytes;
  append_size(bytes, texts.size());
  return bytes + texts;
}

bool is_too_long(const Message& message) {
  size_t size = 0;
  for (const std::string& text : message) size += kSizeBytes + text.size();
  return size > kLongestMessage;
}

// Bytes that have been received.
class Inbox {
 public:
  enum class Found { kMessage, kNothing, kWrong };

  void append(const char* bytes, size_t size) { bytes_.append(bytes, size); }

  // Takes the first message. kWrong: the bytes are no message, or one longer than `longest`.
  Found take(Message& message, size_t longest = kLongestMessage) {
    if (bytes_.size() < kSizeBytes) return Found::kNothing;
    const size_t size = read_size(bytes_);
    if (size > longest) return Found::kWrong;
    if (bytes_.size() < kSizeBytes + size) return Found::kNothing;
    std::string_view rest = std::string_view(bytes_).substr(kSizeBytes, size);
    message.clear();
    while (!rest.empty()) {
      if (rest.size() < kSizeBytes) return Found::kWrong;
      const size_t length = read_size(rest);
      rest.remove_prefix(kSizeBytes);
      if (length > rest.size()) return Found::kWrong;
      message.emplace_back(rest.substr(0, length));
      rest.remove_prefix(length);
    }
    bytes_.erase(0, kSizeBytes + size);
    return Found::kMessage;
  }

 private:
  std::string bytes_;
};

enum class Received { kBytes, kNothing, kEnd };

Received receive(int socket, Inbox& inbox) {
  std::array<char, 65536> bytes;
  const ssize_t got = recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got > 0) {
    inbox.append(bytes.data(), static_cast<size_t>(got));
    return Received::kBytes;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Received::kNothing;
  return Received::kEnd;
}

// Bytes to send.
class Outbox {
 public:
  bool empty() const { return sent_ == bytes_.size(); }
  void append(const std::string& bytes) { bytes_ += bytes; }

  // Sends as much as the socket takes. Returns false if the connection has ended.
  bool send_some(int socket) {
    const ssize_t sent =
        send(socket, bytes_.data() + sent_, bytes_.size() - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    sent_ += static_cast<size_t>(sent);
    if (!empty()) return true;
    bytes_.clear();
    sent_ = 0;
    return true;
  }

 private:
  std::string bytes_;
  size_t sent_ = 0;
};

void send_at_once(int socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// -- The question that waits: "await", the longest wait in microseconds, the least number or an
// empty text, and the keys.

class Wait {
 public:
  using Values = std::map<std::string, std::string>;

  // Returns nothing if `question` is another question.
  static std::optional<Wait> of(const Message& question);

  Deadline until() const { return until_; }

  // Returns true if `values` are in the awaited state, or if a value is no number. Checks each key
  // until the key is present.
  bool is_over(const Values& values);

 private:
  Message question_;
  Deadline until_;
  std::optional<int64_t> least_;
  size_t next_ = kFirstKey;  // in question_; the keys before it are present

  static constexpr size_t kFirstKey = 3;
  static constexpr std::chrono::microseconds kLongestWait = std::chrono::hours(1);
};

int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
  return static_cast<int>(std::clamp(left, milliseconds(0), kMemberStoreCheckPeriod).count());
}

// -- The server

class Table {
 public:
  // Returns the answer to a question that does not wait. Sets `changes` if the question changes the
  // table.
  Message answer(const Message& question, bool* changes) {
    Message found = answer_unnotified(question);
    *changes = question[0] != "get" && question[0] != "has" && question[0] != "count";
    if (*changes) changed_.notify_all();
    return found;
  }

  bool is_over(Wait& wait) {
    const std::lock_guard lock(mutex_);
    return wait.is_over(values_);
  }

  // Waits until the wait is over, or its time is. Returns true if it is over.
  bool await(Wait& wait) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, wait.until(), [&] { return wait.is_over(values_); });
  }

  // Returns the number; `otherwise` if the text is none. Without `otherwise` throws then.
  static int64_t number(const std::string& text, std::optional<int64_t> otherwise = {}) {
    int64_t found = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
    if (error == std::errc() && end == text.data() + text.size()) return found;
    if (otherwise) return *otherwise;
    throw Error(ErrorKind::kInvalid, "a store cannot add to \"" + text + "\"");
  }

 private:
  Message answer_unnotified(const Message& question) {
    if (question.empty()) throw Error(ErrorKind::kInvalid, "an empty question");
    const std::lock_guard lock(mutex_);
    const std::string& wanted = question.front();
    const auto keys_begin = question.begin() + 1;
    const bool with_key = question.size() > 1;
    Message answer{""};
    if (wanted == "set" && question.size() == 3) {
      values_[question[1]] = question[2];
    } else if (wanted == "get") {
      std::transform(keys_begin, question.end(), std::back_inserter(answer), [this](auto& key) {
        const auto found = values_.find(key);
        return found == values_.end() ? std::string("-") : "+" + found->second;
      });
    } else if (wanted == "has") {
      answer.emplace_back(std::all_of(keys_begin, question.end(),
                                      [this](auto& key) { return values_.contains(key); })
                              ? "1"
                              : "0");
    } else if (wanted == "add" && question.size() == 3) {
      const auto found = values_.find(question[1]);
      const int64_t before = found == values_.end() ? 0 : number(found->second);
      int64_t sum = 0;
      if (__builtin_add_overflow(before, number(question[2]), &sum)) {
        throw Error(ErrorKind::kInvalid, "a store cannot add " + question[2] + " to " +
                                             std::to_string(before) + ": the sum is too large");
      }
      answer.push_back(values_[question[1]] = std::to_string(sum));
    } else if (wanted == "append" && question.size() == 3) {
      values_[question[1]] += question[2];
    } else if (wanted == "replace" && question.size() == 4) {
      const auto found = values_.find(question[1]);
      const bool absent = found == values_.end();
      if (absent ? question[2].empty() : found->second == question[2]) {
        values_[question[1]] = question[3];
        answer.push_back(question[3]);
      } else {
        answer.push_back(absent ? question[2] : found->second);
      }
    } else if (wanted == "remove" && with_key) {
      size_t removed = 0;
      std::for_each(keys_begin, question.end(), [&](auto& key) { removed += values_.erase(key); });
      answer.push_back(std::to_string(removed));
    } else if (wanted == "count") {
      answer.push_back(std::to_string(values_.size()));
    } else {
      throw Error(ErrorKind::kInvalid, "a store has no answer to \"" + wanted + "\"");
    }
    return answer;
  }

  std::mutex mutex_;  // guards values_
  std::condition_variable changed_;
  Wait::Values values_;
};

std::optional<Wait> Wait::of(const Message& question) {
  if (question.empty() || question.front() != "await" || question.size() <= kFirstKey) return {};
  Wait wait;
  wait.question_ = question;
  wait.until_ = steady_clock::now() + std::chrono::microseconds(std::clamp<int64_t>(
                                          Table::number(question[1]), 0, kLongestWait.count()));
  if (!question[2].empty()) wait.least_ = Table::number(question[2]);
  return wait;
}

bool Wait::is_over(const Values& values) {
  for (; next_ < question_.size(); ++next_) {
    const auto found = values.find(question_[next_]);
    if (found == values.end()) return false;
    if (least_ && Table::number(found->second, *least_) < *least_) return false;
  }
  return true;
}

Message answer_of_wait(bool is_over) { return {"", is_over ? "1" : "0"}; }

Message answer_of(Table& table, const Message& question, bool* changes) {
  try {
    Message answer = table.answer(question, changes);
    if (is_too_long(answer)) throw Error(ErrorKind::kInvalid, kTooLong);
    return answer;
  } catch (const Error& error) {
    return {error.what()};
  }
}

class Server {
 public:
  Server(const std::string& password, uint16_t& port)
      : password_(password),
        listener_(listen_on_all_addresses(port)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!listener_ || !wake_) {
      throw Error(ErrorKind::kUnavailable,
                  "this process cannot serve a store: " + listening_error(errno));
    }
  }

  Table& table() { return table_; }

  // Called after this process has changed the table.
  void notify() {
    if (waiting_) wake();
  }

  // Wakes serve(), which then returns.
  void stop() {
    stopping_ = true;
    wake();
  }

  void serve() noexcept {
    while (!stopping_) {
      try {
        take_turn();
      } catch (const std::exception&) {  // no memory
        std::this_thread::sleep_for(kFullPause);
      }
    }
    clients_.clear();
  }

 private:
  struct Client {
    UnsharedSocket socket;
    bool known = false;  // the client has sent the password
    Inbox in;
    Outbox out;                     // answers that the socket has not taken yet
    std::optional<Wait> wait = {};  // of the question that the store answers next
  };

  void wake() {
    const uint64_t one = 1;
    if (write(wake_.get(), &one, sizeof one) < 0) return;  // the counter is full: it is awake
  }

  // Waits until clients need attention, and serves them.
  void take_turn() {
    std::vector<pollfd> waits{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const Client& client : clients_) {
      waits.push_back({client.socket.get(),
                       static_cast<short>(client.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    }
    const bool full = std::exchange(full_, false);
    if (full) waits[1].fd = -1;  // the listener is still ready
    if (poll_until(waits, next_turn(full)) < 0) {
      std::this_thread::sleep_for(kFullPause);  // the kernel has no memory
      return;
    }
    eventfd_t count = 0;
    if (waits[0].revents != 0) eventfd_read(wake_.get(), &count);
    waiting_ = false;
    for (size_t i = 0; i < clients_.size(); ++i) {
      if (waits[i + 2].revents != 0) converse(clients_[i], /*readable=*/true);
    }
    // Questions that are answered here may end waits of other clients.
    do {
      table_changed_ = false;
      for (Client& client : clients_) {
        if (client.wait) converse(client, /*readable=*/false);
      }
    } while (table_changed_);
    std::erase_if(clients_, [](const Client& client) { return !client.socket; });
    if (waits[1].revents != 0) accept_all();
  }

  // Returns the time at which the first wait ends; none: there is no wait.
  std::optional<Deadline> next_turn(bool full) const {
    std::optional<Deadline> next;
    if (full) next = steady_clock::now() + kFullPause;
    for (const Client& client : clients_) {
      if (client.wait) next = std::min(next.value_or(Deadline::max()), client.wait->until());
    }
    return next;
  }

  static int poll_until(std::vector<pollfd>& waits, std::optional<Deadline> deadline) {
    timespec time{};
    if (deadline) {
      const auto left = std::max(*deadline - steady_clock::now(), steady_clock::duration(0));
      const auto seconds = std::chrono::floor<std::chrono::seconds>(left);
      time = {seconds.count(), std::chrono::nanoseconds(left - seconds).count()};
    }
    return ppoll(waits.data(), waits.size(), deadline ? &time : nullptr, nullptr);
  }

  void accept_all() {
    while (true) {
      Descriptor made(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      full_ = !made && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED;
      if (!made) return;
      send_at_once(made.get());
      clients_.push_back({UnsharedSocket(std::move(made)), false, {}, {}, {}});
    }
  }

  // Answers the client's questions. Closes the connection if it has ended, or must end.
  void converse(Client& client, bool readable) {
    bool lasts = false;
    try {
      lasts = answer_all(client, readable);
    } catch (const std::exception&) {  // no memory
    }
    if (lasts) return;
    client.wait.reset();
    client.socket.reset();
  }

  // Returns false if the connection must be closed.
  bool answer_all(Client& client, bool readable) {
    const Received received =
        readable ? receive(client.socket.get(), client.in) : Received::kNothing;
    Message message;
    while (true) {
      if (client.wait) {
        waiting_ = true;  // before the table is read, so a later change wakes this thread
        const bool is_over = table_.is_over(*client.wait);
        if (!is_over && steady_clock::now() < client.wait->until()) break;
        client.out.append(encode(answer_of_wait(is_over)));
        client.wait.reset();
      }
      const auto found = client.in.take(message, client.known ? kLongestMessage : kLongestGreeting);
      if (found == Inbox::Found::kWrong) return false;
      if (found == Inbox::Found::kNothing) break;
      if (!client.known && message != Message{password_}) return false;
      const bool greets = !std::exchange(client.known, true);
      try {
        if (!greets) client.wait = Wait::of(message);
      } catch (const Error& error) {
        client.out.append(encode({error.what()}));
        continue;
      }
      if (client.wait) continue;
      bool changes = false;
      client.out.append(encode(greets ? Message{""} : answer_of(table_, message, &changes)));
      table_changed_ = table_changed_ || changes;
    }
    if (received == Received::kEnd) return false;
    return client.out.empty() || client.out.send_some(client.socket.get());
  }

  const std::string password_;
  const UnsharedSocket listener_;
  const Descriptor wake_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> waiting_{false};  // some client may wait for a change of the table
  Table table_;
  std::vector<Client> clients_;  // used by serve() alone, as the members below
  bool table_changed_ = false;   // by a client's question
  bool full_ = false;            // this process has no descriptor for another client
};

// The access of the process that serves the store.
class ServedStore final : public MemberStore {
 public:
  explicit ServedStore(std::shared_ptr<Server> server)
      : server_(std::move(server)),
        thread_([server = server_] { server->serve(); }, [server = server_] { server->stop(); }) {}

 private:
  Message answer(const Message& question, Deadline /*deadline*/) override {
    fork_.require_owner("use its parent's store");
    if (auto wait = Wait::of(question)) return answer_of_wait(server_->table().await(*wait));
    bool changes = false;
    Message found = answer_of(server_->table(), question, &changes);
    if (changes) server_->notify();
    return found;
  }

  const ForkGuard fork_;
  const std::shared_ptr<Server> server_;
  BackgroundThread thread_;
};

// -- The client

// A mutex with a timed lock, for std::unique_lock. ThreadSanitizer of GCC 12 takes std::timed_mutex
// for unlocked, because it does not know pthread_mutex_clocklock().
class TimedMutex {
 public:
  bool try_lock_until(Deadline deadline) {
    std::unique_lock lock(mutex_);
    if (!unlocked_.wait_until(lock, deadline, [this] { return !locked_; })) return false;
    locked_ = true;
    return true;
  }
  void unlock() {
    const std::lock_guard lock(mutex_);
    locked_ = false;
    unlocked_.notify_one();
  }

 private:
  std::mutex mutex_;  // guards locked_
  std::condition_variable unlocked_;
  bool locked_ = false;
};

class RemoteStore final : public MemberStore {
 public:
  explicit RemoteStore(UnsharedSocket socket) : socket_(std::move(socket)) {}

  ~RemoteStore() override {
    if (fork_.in_child()) socket_.forget();
  }

 private:
  // A question whose answer is late leaves the connection usable: answers come in the order of the
  // questions, so later questions skip the late one.
  Message answer(const Message& question, Deadline deadline) override {
    fork_.require_owner("use its parent's connection to a store");
    ++wanting_;
    std::unique_lock lock(mutex_, deadline);
    --wanting_;
    if (!lock) {
      StoreError late(ErrorKind::kTimeout, "another thread's question has no answer yet");
      late.never_asked = true;
      throw late;
    }
    // A wait would keep the others from the connection.
    if (question.front() == "await" && wanting_ != 0) return answer_of_wait(false);
    if (!socket_) throw Error(ErrorKind::kNetwork, "the connection was lost before");
    out_.append(encode(question));
    const uint64_t own = ++asked_;
    Message message;
    while (true) {
      if (!out_.empty() && !out_.send_some(socket_.get())) lose("the connection was lost");
      const Received received = receive(socket_.get(), in_);
      auto found = in_.take(message);
      while (found == Inbox::Found::kMessage && ++answered_ != own) found = in_.take(message);
      if (found == Inbox::Found::kMessage) return message;
      if (found == Inbox::Found::kWrong) lose("its answer is no message");
      if (received == Received::kEnd) lose("the connection was lost");
      if (received == Received::kBytes) continue;
      if (steady_clock::now() >= deadline) {
        throw StoreError(ErrorKind::kTimeout, "it did not answer before the timeout");
      }
      if (must_park()) {
        lock.unlock();
        park();
      }
      pollfd wait{socket_.get(), static_cast<short>(out_.empty() ? POLLIN : POLLIN | POLLOUT), 0};
      poll(&wait, 1, milliseconds_until(deadline));
    }
  }

  [[noreturn]] void lose(const char* why) {
    socket_.reset();
    throw Error(ErrorKind::kNetwork, why);
  }

  const ForkGuard fork_;
  std::atomic<int> wanting_{0};  // threads that wait for the mutex
  TimedMutex mutex_;             // held during a question; guards the members below
  UnsharedSocket socket_;
  Outbox out_;
  Inbox in_;
  uint64_t asked_ = 0;
  uint64_t answered_ = 0;
};

// An attempt to reach a store at one address.
struct Attempt {
  std::string address;
  UnsharedSocket socket;
  bool greeted = false;
  Inbox in;
  std::string failure;

  // Makes a step if the socket is ready. Returns true if the store has answered.
  bool advance(const std::string& password) {
    pollfd ready{socket.get(), static_cast<short>(greeted ? POLLIN : POLLOUT), 0};
    if (poll(&ready, 1, 0) != 1) return false;
    if (!greeted) {
      const int error = connection_error(socket.get());
      if (error != 0) return fail(std::strerror(error));
      send_at_once(socket.get());
      Outbox greeting;
      greeting.append(encode({password}));
      greeted = true;
      // The buffer of a new connection takes a greeting whole.
      if (greeting.send_some(socket.get()) && greeting.empty()) return false;
      return fail("it hung up");
    }
    const Received received = receive(socket.get(), in);
    Message message;
    const auto found = in.take(message, kLongestGreeting);
    if (found == Inbox::Found::kMessage && message == Message{""}) return true;
    if (received == Received::kEnd || found != Inbox::Found::kNothing) {
      return fail("another program answers there");
    }
    return false;
  }

  bool fail(const std::string& why) {
    failure = why;
    socket.reset();
    return false;
  }
};

}  // namespace

Message MemberStore::ask(const Message& question, Deadline deadline) {
  if (is_too_long(question)) throw Error(ErrorKind::kInvalid, kTooLong);
  Message found = answer(question, deadline);
  if (found.empty() || !found.front().empty()) {
    throw Error(ErrorKind::kInvalid, found.empty() ? "an empty answer" : found.front());
  }
  found.erase(found.begin());
  return found;
}

void MemberStore::set(const std::string& key, const std::string& value, Deadline deadline) {
  ask({"set", key, value}, deadline);
}

std::vector<std::optional<std::string>> MemberStore::get(const std::vector<std::string>& keys,
                                                         Deadline deadline) {
  Message question{"get"};
  question.insert(question.end(), keys.begin(), keys.end());
  std::vector<std::optional<std::string>> values;
  for (const std::string& each : ask(question, deadline)) {
    values.push_back(each.starts_with('+') ? std::optional(each.substr(1)) : std::nullopt);
  }
  return values;
}

bool MemberStore::has(const std::vector<std::string>& keys, Deadline deadline) {
  Message question{"has"};
  question.insert(question.end(), keys.begin(), keys.end());
  return ask(question, deadline).at(0) == "1";
}

int64_t MemberStore::add(const std::string& key, int64_t amount, Deadline deadline) {
  return Table::number(ask({"add", key, std::to_string(amount)}, deadline).at(0));
}

void MemberStore::append(const std::string& key, const std::string& more, Deadline deadline) {
  ask({"append", key, more}, deadline);
}

std::string MemberStore::replace(const std::string& key, const std::string& expected,
                                 const std::string& desired, Deadline deadline) {
  return ask({"replace", key, expected, desired}, deadline).at(0);
}

int64_t MemberStore::remove(const std::vector<std::string>& keys, Deadline deadline) {
  Message question{"remove"};
  question.insert(question.end(), keys.begin(), keys.end());
  return Table::number(ask(question, deadline).at(0));
}

int64_t MemberStore::count(Deadline deadline) {
  return Table::number(ask({"count"}, deadline).at(0));
}

bool MemberStore::await(const Awaited& awaited, std::chrono::microseconds longest,
                        Deadline deadline) {
  Message question{"await", std::to_string(longest.count()),
                   awaited.least ? std::to_string(*awaited.least) : std::string()};
  question.insert(question.end(), awaited.keys.begin(), awaited.keys.end());
  return ask(question, deadline).at(0) == "1";
}

std::shared_ptr<MemberStore> serve_member_store(const std::string& password, uint16_t& port) {
  try {
    return std::make_shared<ServedStore>(std::make_shared<Server>(password, port));
  } catch (const std::system_error& error) {  // no thread can be started
    throw Error(ErrorKind::kUnavailable,
                std::string("this process cannot serve a store: ") + error.what());
  }
}

std::shared_ptr<MemberStore> open_member_store(const std::vector<std::string>& addresses,
                                               uint16_t port, const std::string& password,
                                               Deadline deadline,
                                               const std::function<void()>& check) {
  std::vector<Attempt> attempts;
  for (const std::string& address : addresses) {
    Attempt& attempt = attempts.emplace_back();
    attempt.address = address;
    Descriptor made = start_to_connect(address, port);
    if (!made) attempt.failure = std::strerror(errno);
    attempt.socket = UnsharedSocket(std::move(made));
  }
  while (true) {
    if (check) check();
    park_at_process_end();
    std::vector<pollfd> waits;
    for (Attempt& attempt : attempts) {
      if (!attempt.socket) continue;
      if (attempt.advance(password)) {
        return std::make_shared<RemoteStore>(std::move(attempt.socket));
      }
      if (!attempt.socket) continue;
      waits.push_back(
          {attempt.socket.get(), static_cast<short>(attempt.greeted ? POLLIN : POLLOUT), 0});
    }
    std::string failures;
    for (const Attempt& attempt : attempts) {
      failures += (failures.empty() ? "" : "; ") + with_port(attempt.address, port) + ": " +
                  (attempt.failure.empty() ? "no answer" : attempt.failure);
    }
    if (waits.empty()) throw Error(ErrorKind::kNetwork, failures);
    if (steady_clock::now() >= deadline) throw Error(ErrorKind::kTimeout, failures);
    poll(waits.data(), waits.size(), milliseconds_until(deadline));
  }
}

}  // namespace hbm::bootstrap
