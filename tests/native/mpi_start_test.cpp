// The environment in which MPI starts, and the trial of MPI_Init in a child process. In these
// tests, shell scripts replace the program of the trial.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "communicator/mpi/environment.h"
#include "communicator/mpi/library.h"
#include "communicator/mpi/trial.h"
#include "expect_error.h"
#include "fake_store.h"

namespace hbm::communicator::mpi {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::seconds kTimeout{60};
constexpr const char* kPasses = "echo 'hbm: MPI_Init has returned'; exec sleep 1000";

TEST(StartEnvironment, OverridesAndRestores) {
  setenv("MPIR_CVAR_PMI_VERSION", "2", 1);
  setenv("PMI_RANK", "7", 1);
  {
    const StartEnvironment environment;
    EXPECT_STREQ(std::getenv("MPIR_CVAR_PMI_VERSION"), "1");
    EXPECT_STREQ(std::getenv("MPIR_CVAR_CH4_NUM_VCIS"), "1");
    EXPECT_EQ(std::getenv("PMI_RANK"), nullptr);
  }
  EXPECT_STREQ(std::getenv("MPIR_CVAR_PMI_VERSION"), "2");
  EXPECT_EQ(std::getenv("MPIR_CVAR_CH4_NUM_VCIS"), nullptr);
  EXPECT_STREQ(std::getenv("PMI_RANK"), "7");
  unsetenv("MPIR_CVAR_PMI_VERSION");
  unsetenv("PMI_RANK");
}

TEST(StartEnvironment, AnEmptyUcxTlsCountsAsUnset) {
  for (const char* before : {"", "^cma", "tcp,self"}) {
    setenv("UCX_TLS", before, 1);
    EXPECT_EQ(risky_variables(), "");
    set_transport_defaults();
    EXPECT_STREQ(std::getenv("UCX_TLS"), *before == '\0' ? "^cma" : before);
  }
  setenv("UCX_TLS", "", 1);
  set_transport_defaults(/*shares_memory=*/false);
  EXPECT_STREQ(std::getenv("UCX_TLS"), "^sm");
  EXPECT_EQ(risky_variables(), "");
  unsetenv("UCX_TLS");
}

TEST(StartEnvironment, RiskyVariablesAreListed) {
  setenv("UCX_TLS", "rc", 1);
  setenv("FI_PROVIDER", "psm2", 1);
  setenv("MPIR_CVAR_CH4_NUM_VCIS", "4", 1);  // not listed: hbm overrides it
  EXPECT_EQ(risky_variables(), "FI_PROVIDER=psm2 UCX_TLS=rc");
  for (const char* name : {"UCX_TLS", "FI_PROVIDER", "MPIR_CVAR_CH4_NUM_VCIS"}) unsetenv(name);
  EXPECT_EQ(risky_variables(), "");
}

// Tries MPI_Init as rank 0 of `size`, with a shell script as the program of the trial.
void try_with(const std::string& script, int size = 1,
              std::chrono::milliseconds patience = kTimeout,
              const std::function<void()>& check = {}) {
  set_trial_program({"/bin/sh", "-c", script});
  const PmiResponder::Job job{.name = "job",
                              .rank = 0,
                              .size = size,
                              .node_of = std::vector<int>(static_cast<size_t>(size)),
                              .deadline = steady_clock::now() + patience,
                              .is_elsewhere = true};
  try_initialise(library(), std::make_shared<FakeStore>(), job, "UCX_TLS=rc", check);
}

class Trial : public testing::Test {
 protected:
  static void SetUpTestSuite() {
#if defined(__SANITIZE_THREAD__)
    // UCX's hooks of memory calls crash in threads that ThreadSanitizer has already ended.
    setenv("UCX_MEM_EVENTS", "n", 1);
#endif
    set_search_path({HBM_MPI_LIB_DIR});
  }
  static void TearDownTestSuite() { unsetenv("UCX_MEM_EVENTS"); }
  void TearDown() override { set_trial_program({}); }
};

TEST_F(Trial, ReturnsAfterMpiInit) {
  try_with(kPasses);
  set_trial_program({});
  const PmiResponder::Job job;
  try_initialise(library(), nullptr, job, "UCX_TLS=rc", {});  // without a program: no trial
}

TEST_F(Trial, ReportsHowTheProgramEnded) {
  expect_error(ErrorKind::kUnavailable, {"exit code 15", "UCX_TLS=rc", "first second"},
               [] { try_with("echo first; echo second >&2; exit 15"); });
  expect_error(ErrorKind::kUnavailable, {"Segmentation fault", "UCX_TLS=rc"},
               [] { try_with("kill -SEGV $$"); });
  expect_error(ErrorKind::kUnavailable, {"cannot start a process"}, [] {
    set_trial_program({"/no/such/program"});
    try_initialise(library(), std::make_shared<FakeStore>(), {}, "UCX_TLS=rc", {});
  });
}

TEST_F(Trial, EndsAtTheDeadline) {
  constexpr std::chrono::milliseconds kSoon{50};
  expect_error(ErrorKind::kTimeout, {"did not return in time", "UCX_TLS=rc"},
               [] { try_with("exec sleep 1000", 1, kSoon); });
  expect_error(ErrorKind::kTimeout, {"did not return in time", "UCX_TLS=rc"},
               [] { try_with(kPasses, 2, kSoon); });  // rank 1 does not come
}

TEST_F(Trial, RethrowsTheChecksException) {
  EXPECT_THROW(try_with(kPasses, 2, kTimeout, [] { throw std::domain_error("over"); }),
               std::domain_error);
}

// UCX creates a file in /dev/shm and unlinks it a moment later. A rank may kill the program between
// the two.
TEST_F(Trial, LeavesNoSegment) {
  for (const char* prefix : {"/dev/shm/ucx_shm_posix_", "/dev/shm/mpich_shm_"}) {
    const std::string segment = prefix + std::to_string(getpid());
    const std::string script = "exec 3>" + segment + "; exec sleep 1000";
    const auto check = [&] {
      if (access(segment.c_str(), F_OK) == 0) throw std::domain_error("over");
    };
    EXPECT_THROW(try_with(script, 1, kTimeout, check), std::domain_error);
    EXPECT_NE(access(segment.c_str(), F_OK), 0) << segment;
    unlink(segment.c_str());
  }
}

}  // namespace
}  // namespace hbm::communicator::mpi
