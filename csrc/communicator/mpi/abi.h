// The two ABIs of MPI that hbm supports, as far as hbm needs them: the layout of handles and of
// MPI_Status, and the values of constants.
//
// Libraries named libmpi.so.12 have MPICH's ABI (the MPICH ABI Compatibility Initiative). Libraries
// named libmpi_abi.so.1 have the standard ABI (MPI 5.0, appendix A). Both ABIs are fixed, so hbm is
// built without an mpi.h; tests/native/mpi_abi_*_test.cpp compare these values with MPICH's
// headers.
#pragma once

#include <cstdint>

namespace hbm::communicator::mpi {

struct MpichStatus {
  int count_low;
  int count_high_and_cancelled;
  int source;
  int tag;
  int error;
};

struct MpichAbi {
  static constexpr const char* kName = "MPICH";

  using Handle = int;
  using Status = MpichStatus;

  static constexpr std::uintptr_t kCommWorld = 0x44000000;
  static constexpr std::uintptr_t kCommSelf = 0x44000001;
  static constexpr std::uintptr_t kRequestNull = 0x2c000000;
  static constexpr std::uintptr_t kErrorsReturn = 0x54000001;
  static constexpr std::uintptr_t kByte = 0x4c00010d;
  static constexpr std::uintptr_t kStatusIgnore = 1;
  static constexpr int kAnySource = -2;
  static constexpr int kUndefined = -32766;
  static constexpr int kThreadMultiple = 3;
  static constexpr int kTagUpperBound = 0x64400001;
  static constexpr int kErrorTruncate = 14;
  static constexpr int kErrorInStatus = 17;
};

struct StandardStatus {
  int source;
  int tag;
  int error;
  int internal[5];
};

struct StandardAbi {
  static constexpr const char* kName = "MPI 5 standard";
  static constexpr int kVersion = 1;  // as MPI_Abi_get_version returns it

  using Handle = void*;
  using Status = StandardStatus;

  static constexpr std::uintptr_t kCommWorld = 0x101;
  static constexpr std::uintptr_t kCommSelf = 0x102;
  static constexpr std::uintptr_t kRequestNull = 0x180;
  static constexpr std::uintptr_t kErrorsReturn = 0x143;
  static constexpr std::uintptr_t kByte = 0x247;
  static constexpr std::uintptr_t kStatusIgnore = 0;
  static constexpr int kAnySource = -1;
  static constexpr int kUndefined = -32766;
  static constexpr int kThreadMultiple = 4096;
  static constexpr int kTagUpperBound = 501;
  static constexpr int kErrorTruncate = 15;
  static constexpr int kErrorInStatus = 19;
};

}  // namespace hbm::communicator::mpi
