// How the last box left a store: the file `state`, of one sector, which is written in place, so
// that a full disk does not matter, and as a whole or not at all.
//
// Errors: Error(kUnavailable) when the kernel refuses, Error(kExhausted) when the disk is full.
//
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <string>

#include "box/protocol/protocol.h"
#include "box/server/storage/digest.h"

namespace hbm::box {

struct StoreState {
  enum class Phase : uint32_t {
    kMaking = 1,  // the first box has not let anyone in yet
    kServed,      // a box serves it, or has been killed
    kClosed,      // a box ended in order, and wrote `checksums`
  };
  Phase phase = Phase::kMaking;
  bool sync = false;   // kServed: each change was on the disk before its reply
  std::string boot;    // kServed: the boot_id() of the box
  Digest checksums{};  // kClosed: of the file `checksums`
};

// Throws Error(kUnavailable) when the file is damaged, or belongs to other contents.
StoreState read_state(const std::string& path, const smb::Id& contents);

// Makes the file, or replaces what is in it. The disk has it afterwards.
void make_state(const std::string& path, const smb::Id& contents, const StoreState& state);
void write_state(const std::string& path, const smb::Id& contents, const StoreState& state);

}  // namespace hbm::box
