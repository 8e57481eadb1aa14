// The program "box_threads": threads that use a memory box at the same time.
//
//   connect URL TOKEN TRANSPORT CLIENTS THREADS BYTES
//       Makes CLIENTS clients of one connection each, with THREADS threads each. Every thread has a
//       segment and a buffer of BYTES. Replaces earlier clients.
//   run ACTION MILLISECONDS
//       All threads repeat ACTION for MILLISECONDS. The answer has six numbers for each thread. The
//       first two are the number of times that it ran ACTION, and the seconds since the common
//       start. The others are the minimum, mean, 99th percentile and maximum of the microseconds
//       that ACTION took.
//
// Actions, each on all BYTES:
// - "read", "write": in one operation
// - "alone:SIZE": writes messages of SIZE bytes, one operation after the other
// - "batch:SIZE": writes such messages, and issues all operations together
// - "packed:SIZE": copies such messages into the buffer, and writes the buffer in one operation
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "program.h"
#include "smb_client.h"

namespace hbm::bench {
namespace {

using Clock = std::chrono::steady_clock;

// The actions of one thread, on its own segment and buffer.
class Repeater {
 public:
  using Action = std::function<void()>;

  Repeater(std::shared_ptr<box::client::Client> client, size_t bytes)
      : client_(std::move(client)), local_(bytes), messages_(bytes), segment_(allocate(bytes)) {}

  // Throws Error(kInvalid) if the name is unknown.
  Action action(const std::string& name) {
    std::byte* const local = local_.bytes().data();
    const size_t bytes = local_.bytes().size();
    if (name == "read") return [=, this] { client_->read(segment_, 0, local, bytes); };
    if (name == "write") return [=, this] { client_->write(segment_, 0, local, bytes); };
    const size_t colon = name.find(':');
    const size_t size = colon == std::string::npos ? 0 : std::stoull(name.substr(colon + 1));
    const std::string way = name.substr(0, colon);
    if (size == 0 || bytes % size != 0) {
      throw Error(ErrorKind::kInvalid, "no action \"" + name + "\"");
    }
    if (way == "alone") return [=, this] { alone(size); };
    if (way == "batch") return [=, this] { batch(size); };
    if (way == "packed") return [=, this] { packed(size); };
    throw Error(ErrorKind::kInvalid, "no action \"" + name + "\"");
  }

 private:
  box::client::Segment allocate(size_t bytes) {
    box::client::AllocOptions options;
    options.size = bytes;
    options.mode = box::protocol::AllocMode::kCreate;
    options.temporary = true;
    return client_->alloc(options);
  }

  void alone(size_t size) {
    for (size_t at = 0; at < messages_.bytes().size(); at += size) {
      client_->write(segment_, at, messages_.bytes().data() + at, size);
    }
  }

  void batch(size_t size) {
    box::client::Batch batch = client_->batch();
    std::vector<box::client::Future> written;
    for (size_t at = 0; at < messages_.bytes().size(); at += size) {
      written.push_back(batch.write(segment_, at, messages_.bytes().data() + at, size));
    }
    batch.issue_and_wait_next();
    for (const box::client::Future& one : written) one.get();
  }

  void packed(size_t size) {
    for (size_t at = 0; at < messages_.bytes().size(); at += size) {
      std::memcpy(local_.bytes().data() + at, messages_.bytes().data() + at, size);
    }
    client_->write(segment_, 0, local_.bytes().data(), local_.bytes().size());
  }

  const std::shared_ptr<box::client::Client> client_;
  const Pages local_;
  const Pages messages_;
  const box::client::Segment segment_;
};

// Repeats `action` until `end`, at least once. Returns the six numbers of this thread. Its seconds
// count from `begin`, the common start of all threads.
Numbers repeated(const Repeater::Action& action, Clock::time_point begin, Clock::time_point end) {
  Numbers taken;  // microseconds
  Clock::time_point now = Clock::now();
  do {
    const Clock::time_point start = now;
    action();
    now = Clock::now();
    taken.push_back(std::chrono::duration<double, std::micro>(now - start).count());
  } while (now < end);
  const double seconds = std::chrono::duration<double>(now - begin).count();
  std::sort(taken.begin(), taken.end());
  const auto count = static_cast<double>(taken.size());
  const double mean = std::accumulate(taken.begin(), taken.end(), 0.0) / count;
  const double p99 = taken[(taken.size() - 1) * 99 / 100];
  return {count, seconds, taken.front(), mean, p99, taken.back()};
}

class Repeaters {
 public:
  void connect(const Words& words) {
    repeaters_.clear();
    box::client::ClientOptions options;
    options.url = words.at(0);
    options.token = words.at(1);
    options.transport = box::client::parse_transport(words.at(2));
    options.lanes = 1;
    for (size_t client = 0; client < number(words, 3); ++client) {
      const auto one = std::make_shared<box::client::Client>(options);
      for (size_t thread = 0; thread < number(words, 4); ++thread) {
        repeaters_.push_back(std::make_unique<Repeater>(one, number(words, 5)));
      }
    }
  }

  Numbers run(const std::string& name, size_t milliseconds) {
    std::vector<Repeater::Action> actions;
    for (const auto& one : repeaters_) {
      actions.push_back(one->action(name));
      actions.back()();  // an uncounted call
    }
    std::latch ready(static_cast<std::ptrdiff_t>(actions.size()) + 1);
    Clock::time_point begin;  // common start; written before the latch opens
    std::vector<std::future<Numbers>> running;
    for (const Repeater::Action& action : actions) {
      running.push_back(std::async(std::launch::async, [&ready, &begin, &action, milliseconds] {
        ready.arrive_and_wait();
        return repeated(action, begin, begin + std::chrono::milliseconds(milliseconds));
      }));
    }
    begin = Clock::now();
    ready.count_down();
    for (const auto& one : running) one.wait();
    Numbers found;
    for (auto& one : running) {
      const Numbers own = one.get();
      found.insert(found.end(), own.begin(), own.end());
    }
    return found;
  }

 private:
  std::vector<std::unique_ptr<Repeater>> repeaters_;
};

}  // namespace
}  // namespace hbm::bench

int main() {
  using namespace hbm::bench;
  Repeaters repeaters;
  return serve(
      {{"connect",
        [&](const Words& words) {
          repeaters.connect(words);
          return Numbers();
        }},
       {"run", [&](const Words& words) { return repeaters.run(words.at(0), number(words, 1)); }}});
}
