#include "seeds.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

namespace hbm {
namespace {

constexpr const char* kVariable = "HBMCOMM_TEST_SEED";

// The run's seed. Programs that a test starts inherit it by HBMCOMM_TEST_SEED.
uint64_t run_seed = 0;
std::atomic<uint64_t> asked{0};  // number of seeds that the running test has drawn

void set_run_seed(uint64_t seed) {
  run_seed = seed;
  setenv(kVariable, std::to_string(seed).c_str(), 1);
}

class Listener : public testing::EmptyTestEventListener {
 public:
  Listener() {
    const char* const given = std::getenv(kVariable);
    set_run_seed(given == nullptr ? std::random_device{}() : std::strtoull(given, nullptr, 10));
  }

  void OnTestIterationStart(const testing::UnitTest&, int iteration) override {
    if (iteration > 0) set_run_seed(run_seed + 1);  // a repeat (--gtest_repeat)
  }
  void OnTestStart(const testing::TestInfo&) override { asked = 0; }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (!test.result()->Failed()) return;
    std::printf("%s=%llu repeats the data of %s.%s\n", kVariable,
                static_cast<unsigned long long>(run_seed), test.test_suite_name(), test.name());
    std::fflush(stdout);
  }
};

}  // namespace

uint64_t test_seed() {
  const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
  std::string key = std::to_string(run_seed) + ' ' + std::to_string(asked.fetch_add(1));
  if (test != nullptr) key += std::string(" ") + test->test_suite_name() + '.' + test->name();
  uint64_t hash = 0xCBF29CE484222325;  // FNV-1a, the same with every compiler
  for (const char byte : key) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001B3;
  return hash;
}

bool print_seeds() {
  testing::UnitTest::GetInstance()->listeners().Append(new Listener);
  return true;
}

}  // namespace hbm
