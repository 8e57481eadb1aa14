// The library that hbm chooses for MPI, and the errors about libraries that do not fit.
#include "communicator/mpi/library.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <string>

#include "base/error.h"
#include "communicator/mpi/world.h"
#include "expect_error.h"
#include "forked_ranks.h"
#include "mpi_ranks.h"

namespace hbm::communicator::mpi {
namespace {

namespace fs = std::filesystem;

const fs::path kFakes = HBM_FAKE_MPI_DIR;
const fs::path kOpenMpi = kFakes / "libfake_open_mpi.so";
const fs::path kStandard1 = kFakes / "libfake_standard_1.so";
const fs::path kStandard2 = kFakes / "libfake_standard_2.so";
const fs::path kNameAlone = kFakes / "libfake_name_alone.so";

// A process looks for the MPI library only once, so each trial has a process of its own.
void in_a_process_of_its_own(const std::function<void()>& body) { EXPECT_EQ(run_forked(body), 0); }

void expect_refused(const fs::path& named, std::initializer_list<std::string> words) {
  in_a_process_of_its_own([&] {
    setenv("HBMCOMM_MPI_LIB", named.c_str(), 1);
    expect_error(ErrorKind::kUnavailable, words, [] { library(); });
  });
}

TEST(MpiLibrary, OpenMpiIsRefusedByName) {
  expect_refused(kOpenMpi, {kOpenMpi.c_str(), "is Open MPI v5.0.99,", "from version 6 on",
                            "libmpi_abi.so.1", "pip install mpich", "HBMCOMM_MPI_LIB"});
}

TEST(MpiLibrary, UnknownStandardAbiVersionIsRefused) {
  expect_refused(kStandard2, {"is MPICH 99.0,", "version 2 of MPI's standard ABI", "version 1"});
}

TEST(MpiLibrary, MissingFunctionIsNamed) {
  expect_refused(kNameAlone, {kNameAlone.c_str(), "has no function MPI_"});
}

TEST(MpiLibrary, MissingFileIsNamed) {
  expect_refused("/no/such/libmpi.so", {"no MPI library was found", "/no/such/libmpi.so"});
}

TEST(MpiLibrary, LibrarysVersionRevealsTheStandardAbi) {
  in_a_process_of_its_own([] {
    setenv("HBMCOMM_MPI_LIB", kStandard1.c_str(), 1);
    EXPECT_EQ(library().api->abi(), "MPI 5 standard");
    EXPECT_EQ(library().api->version(), "MPICH 99.0");
    EXPECT_EQ(library().found_by, "HBMCOMM_MPI_LIB");
  });
}

// Among libraries next to Python, hbm prefers one with MPICH's ABI, then one with the standard ABI,
// then Open MPI.
TEST(MpiLibrary, BestOfSeveralIsChosen) {
  const fs::path folder = fs::temp_directory_path() / ("hbm_mpi_" + std::to_string(getpid()));
  const auto find = [&folder] {
    unsetenv("HBMCOMM_MPI_LIB");
    set_search_path({folder / "first", folder / "second"});
    library();
  };
  fs::create_directories(folder / "first");
  fs::create_directories(folder / "second");
  fs::create_symlink(kOpenMpi, folder / "first" / "libmpi.so.40");
  fs::create_symlink(kStandard2, folder / "second" / "libmpi_abi.so.1");
  in_a_process_of_its_own([&] {
    expect_error(ErrorKind::kUnavailable, {"second/libmpi_abi.so.1 is MPICH 99.0"}, find);
  });
  fs::create_symlink(kNameAlone, folder / "second" / "libmpi.so.12");
  in_a_process_of_its_own([&] {
    expect_error(ErrorKind::kUnavailable, {"second/libmpi.so.12 has no function"}, find);
  });
  fs::remove_all(folder);
}

// If a library's MPI_Init does not ask hbm's responder, each rank starts a world of one process.
TEST(MpiLibrary, ErrorNamesALibraryWithoutPmi1) {
  run_forked_ranks(2, [](const ForkedRank& rank) {
    setenv("HBMCOMM_MPI_LIB", kStandard1.c_str(), 1);
    expect_error(ErrorKind::kUnavailable, {"MPICH 99.0", "does not speak PMI-1", "mpi://"},
                 [&] { Group(rank.directory, "world", rank.rank, rank.size, 4096); });
  });
}

// Under a launcher that offers only PMIx, MPICH's MPI_Init would end the process. So hbm must not
// call it.
TEST(MpiLibrary, PmixOnlyLauncherDoesNotStartMpich) {
  const auto launched = [] {
    World::launched(std::chrono::steady_clock::now() + std::chrono::seconds(10));
  };
  in_a_process_of_its_own([&] {
    setenv("HBMCOMM_MPI_LIB", kStandard1.c_str(), 1);
    setenv("PMIX_NAMESPACE", "job@1", 1);
    expect_error(ErrorKind::kUnavailable,
                 {"PMIX_NAMESPACE=job@1", "speaks PMIx", "MPICH 99.0", "does not", "mpiexec"},
                 launched);
  });
}

}  // namespace
}  // namespace hbm::communicator::mpi
