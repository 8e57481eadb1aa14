// Kills a server at random times. Afterwards each accumulate and each fetch_add is applied exactly
// once.
//
// The server is a child process, and its clients are threads of the child. A client has no state of
// its own. It reads its session's `applied`, as a reconnecting client does, and continues with the
// next number, so a lost or repeated update shows in the sums.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "box/server/accumulator.h"
#include "box/server/storage/store.h"
#include "seeds.h"
#include "smb_store_fixture.h"
#include "stress.h"

namespace hbm::box::server {
namespace {

constexpr uint64_t kCount = 200'000;  // elements
constexpr uint64_t kSessions = 2;
constexpr storage::RecordSizes kSizes{
    .sessions = 8, .operations = 3, .parts = 4, .chunk = 64 << 10};

enum : uint64_t { kTarget = 1, kOnes, kCells, kSigns, kUnits, kSums, kCopies };

struct Server {
  explicit Server(const std::string& directory) : store(open_store(directory, kSizes)) {
    for (const auto& one : store->take_found()) segments[one->key.low] = one;
    for (storage::SessionRecord* one : store->records().sessions()) sessions[one->id.low] = one;
  }
  storage::BoxSegment& operator[](uint64_t key) { return *segments.at(key); }

  const std::unique_ptr<storage::Store> store;
  std::map<uint64_t, std::shared_ptr<storage::BoxSegment>> segments;
  std::map<uint64_t, storage::SessionRecord*> sessions;
};

void prepare(const std::string& directory) {
  const std::unique_ptr<storage::Store> store = open_store(directory, kSizes);
  store->create(creation(kTarget, kCount * 8));
  const auto ones = store->create(creation(kOnes, kCount * 8));
  std::fill_n(contents<int64_t>(*ones), kCount, 1);
  store->create(creation(kCells, 4096));
  const auto signs = store->create(creation(kSigns, kCount * 8 * kSessions));
  std::fill_n(contents<double>(*signs), kCount * kSessions, 1);
  const auto units = store->create(creation(kUnits, kCount * 4));
  std::fill_n(contents<float>(*units), kCount, 1);
  store->create(creation(kSums, kCount * 8 * kSessions));
  store->create(creation(kCopies, kCount * 4 * kSessions));
  for (uint64_t id = 0; id < kSessions; ++id) store->records().open_session({0, id});
}

// The kinds of requests of a session. kAddOnes adds 1 to the range that range_of() returns. The
// last two kinds have two types: kAddUnits adds float32 to the session's sums of float64, and
// kCopySums copies these sums to float32.
enum class Kind { kAddOnes, kAddToCell, kFlipSigns, kAddUnits, kCopySums };

Kind kind_of(uint64_t number) {
  constexpr Kind kKinds[] = {Kind::kAddToCell, Kind::kFlipSigns, Kind::kAddOnes,
                             Kind::kAddUnits,  Kind::kCopySums,  Kind::kAddOnes};
  return kKinds[number % std::size(kKinds)];
}

struct Range {
  uint64_t first, last;
};
Range range_of(uint64_t session, uint64_t number) {
  std::minstd_rand random(static_cast<unsigned>(session * 1'000'003 + number));
  const uint64_t first = random() % kCount, last = random() % kCount;
  return {std::min(first, last), std::max(first, last)};
}

void execute(Server& server, Accumulator& accumulator, uint64_t id, storage::SessionRecord& session,
             uint64_t number) {
  const auto [first, last] = range_of(id, number);
  const At signs{server[kSigns], id * kCount * 8};
  const At sums{server[kSums], id * kCount * 8}, copies{server[kCopies], id * kCount * 4};
  switch (kind_of(number)) {
    case Kind::kAddToCell:
      accumulator.fetch_add(session, number, {server[kCells], id * 8}, 1);
      break;
    case Kind::kFlipSigns:
      accumulator.accumulate(session, number, signs, signs, kCount * 8,
                             sum_of(Dtype::kFloat64, -2));
      break;
    case Kind::kAddOnes:
      accumulator.accumulate(session, number, {server[kTarget], first * 8},
                             {server[kOnes], first * 8}, (last - first) * 8, sum_of(Dtype::kInt64));
      break;
    case Kind::kAddUnits:
      accumulator.accumulate(session, number, sums, {server[kUnits], 0}, kCount * 8,
                             {.target = Dtype::kFloat64, .source = Dtype::kFloat32});
      break;
    case Kind::kCopySums:
      accumulator.accumulate(
          session, number, copies, sums, kCount * 4,
          {.target = Dtype::kFloat32, .source = Dtype::kFloat64, .combine = Combine::kAssign});
  }
}

// Each client writes a byte to `ready` after its first request.
[[noreturn]] void serve_until_killed(const std::string& directory, int ready) {
  Server server(directory);
  Accumulator accumulator(server.store->records(), 2);
  std::vector<std::thread> clients;
  for (auto& [id, session] : server.sessions) {
    clients.emplace_back([&server, &accumulator, ready, id = id, session = session] {
      bool notified = false;
      while (true) {
        execute(server, accumulator, id, *session, session->applied + 1);
        if (!std::exchange(notified, true) && write(ready, "r", 1) != 1) _exit(2);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  _exit(1);
}

// Expects that memory has the results of all requests that the sessions' records count as applied,
// and of no other request.
void check(const std::string& directory) {
  Server server(directory);
  std::vector<int64_t> steps(kCount + 1);
  for (const auto& [id, session] : server.sessions) {
    int64_t cell = 0;
    double sign = 1, sum = 0;
    float copy = 0;
    for (uint64_t number = 1; number <= session->applied; ++number) {
      const auto [first, last] = range_of(id, number);
      switch (kind_of(number)) {
        case Kind::kAddToCell:
          if (const storage::RequestOutcome* outcome = session->outcome(number)) {
            ASSERT_EQ(outcome->value, cell);
          }
          ++cell;
          break;
        case Kind::kFlipSigns:
          sign = -sign;
          break;
        case Kind::kAddOnes:
          ++steps[first];
          --steps[last];
          break;
        case Kind::kAddUnits:
          ++sum;
          break;
        case Kind::kCopySums:
          copy = static_cast<float>(sum);
      }
    }
    ASSERT_EQ(contents<int64_t>(server[kCells])[id], cell);
    const double* signs = contents<double>(server[kSigns]) + id * kCount;
    ASSERT_EQ(std::count(signs, signs + kCount, sign), kCount);
    const double* sums = contents<double>(server[kSums]) + id * kCount;
    ASSERT_EQ(std::count(sums, sums + kCount, sum), kCount);
    const float* copies = contents<float>(server[kCopies]) + id * kCount;
    ASSERT_EQ(std::count(copies, copies + kCount, copy), kCount);
  }
  int64_t expected = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    expected += steps[i];
    ASSERT_EQ(contents<int64_t>(server[kTarget])[i], expected) << "element " << i;
  }
}

// Forks a server, and kills it at a random time. One server in four may be killed before any
// request. The others are killed only after a client's first request, and `served` counts them.
void run_and_kill(const std::string& directory, std::mt19937_64& random, uint64_t& served) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const Descriptor ready(ends[0]);
  Descriptor tells(ends[1]);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) serve_until_killed(directory, tells.get());
  tells = Descriptor();
  char byte;
  if (random() % 4 != 0) {
    ASSERT_EQ(read(ready.get(), &byte, 1), 1) << "the server ended by itself";
    ++served;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
  ASSERT_EQ(kill(child, SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << "the server ended by itself";
}

// HBM_STRESS_KILLS=1000 kills the server a thousand times.
TEST(Crash, EveryOperationIsAppliedOnce) {
  const int rounds = stress("HBM_STRESS_KILLS", 10);
  const Scratch scratch;
  prepare(scratch.store());
  std::mt19937_64 random = test_random();
  uint64_t served = 0;
  for (int round = 0; round < rounds; ++round) {
    ASSERT_NO_FATAL_FAILURE(run_and_kill(scratch.store(), random, served)) << "round " << round;
    ASSERT_NO_FATAL_FAILURE(check(scratch.store())) << "round " << round;
  }
  const Server server(scratch.store());
  uint64_t applied = 0;
  for (const auto& [id, session] : server.sessions) applied += session->applied;
  EXPECT_GE(applied, served);
}

}  // namespace
}  // namespace hbm::box::server
