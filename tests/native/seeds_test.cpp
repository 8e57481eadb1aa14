#include "seeds.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <string>

#include "forked_ranks.h"

namespace hbm {
namespace {

TEST(Seeds, DifferWithinATest) { EXPECT_NE(test_seed(), test_seed()); }

TEST(Seeds, ContinueTheParentsSequenceInAFork) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_EQ(run_forked([&] {
              const uint64_t seed = test_seed();
              EXPECT_EQ(write(ends[1], &seed, sizeof seed), static_cast<ssize_t>(sizeof seed));
            }),
            0);
  uint64_t theirs = 0;
  ASSERT_EQ(read(ends[0], &theirs, sizeof theirs), static_cast<ssize_t>(sizeof theirs));
  EXPECT_EQ(test_seed(), theirs);
  close(ends[0]);
  close(ends[1]);
}

TEST(Seeds, DISABLED_Fails) { FAIL() << test_random()() << " drawn"; }

std::string said_with(const std::string& seed) {
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof self);
  if (length <= 0) return "";
  const std::string command = "HBMCOMM_TEST_SEED=" + seed + " '" +
                              std::string(self, static_cast<size_t>(length)) +
                              "' --gtest_also_run_disabled_tests --gtest_filter='*DISABLED_Fails'";
  std::FILE* const output = popen(command.c_str(), "r");
  std::string said;
  std::array<char, 512> line;
  while (std::fgets(line.data(), line.size(), output) != nullptr) {
    const std::string text = line.data();
    if (text.find(" drawn") != std::string::npos || text.find("repeats") != std::string::npos) {
      said += text;
    }
  }
  pclose(output);
  return said;
}

TEST(Seeds, FailedTestPrintsThem) {
  const std::string said = said_with("77");
  EXPECT_NE(said.find("HBMCOMM_TEST_SEED=77 repeats the data of Seeds.DISABLED_Fails"),
            std::string::npos)
      << said;
  EXPECT_EQ(said_with("77"), said);
  EXPECT_NE(said_with("78"), said);
}

}  // namespace
}  // namespace hbm
