// A client of a memory box and what it repeats, by name, each on all bytes of `local` and of a
// segment as large:
//   read, write              box to local, local to box
//   accumulate:TYPE          segment += scale * source, another segment; scale is 0.5, and 1 for
//                            integers
//   add:TYPE                 the same, after a write of local to the source
//   fetch_add                1, to the segment's first cell
//   memcpy:read, memcpy:write, copy_bytes:read, copy_bytes:write
//                            the same copies by hand; shm alone
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "smb_client.h"

namespace hbm::bench {

class ClientLoop {
 public:
  using Action = std::function<void()>;

  // Connects, and allocates segments that go with this client.
  ClientLoop(const box::client::ClientOptions& options, std::span<std::byte> local);

  // Throws Error(kInvalid) for a name that there is not.
  Action action(const std::string& name);

  // A client that is fast because it does nothing is found out before it is timed: these throw
  // Error(kMismatch).
  void check();
  void check_sum(const std::string& dtype);  // leaves ones in the source

 private:
  Action copy(const std::string& name);
  Action accumulate(const std::string& dtype, bool write_first);
  const box::client::Segment& source();

  box::client::Client client_;
  const std::span<std::byte> local_;
  const box::client::Segment segment_;
  std::optional<box::client::Segment> source_;
};

}  // namespace hbm::bench
