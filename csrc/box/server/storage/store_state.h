// The state in which the last box left a store: the file `state`, one sector long. It is
// overwritten in place, so a full disk does not matter. A disk writes one sector atomically.
//
// Errors: Error(kUnavailable) if the kernel fails, Error(kExhausted) if the disk is full.
//
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <string>

#include "box/protocol/protocol.h"
#include "box/server/storage/digest.h"

namespace hbm::box::server::storage {

struct StoreState {
  enum class Phase : uint32_t {
    kMaking = 1,  // the first box is creating the store
    kServed,      // a box serves the store, or was killed while it did
    kClosed,      // a box closed it in order, and wrote `checksums`
  };
  Phase phase = Phase::kMaking;
  bool sync = false;   // kServed: each change was on the disk before its reply
  std::string boot;    // kServed: the boot_id() of the box
  Digest checksums{};  // kClosed: of the file `checksums`
};

// Throws Error(kUnavailable) if the file is damaged, or of another store.
StoreState read_state(const std::string& path, const protocol::Id& generation);

// make_state() creates the file, and write_state() overwrites it. The data are on the disk when the
// functions return.
void make_state(const std::string& path, const protocol::Id& generation, const StoreState& state);
void write_state(const std::string& path, const protocol::Id& generation, const StoreState& state);

}  // namespace hbm::box::server::storage
