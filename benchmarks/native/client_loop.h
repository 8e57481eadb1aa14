// A client of a memory box, and the actions that it repeats. Each action uses all bytes of the
// buffer `local` and of a segment of the same size:
//   read, write              copies the segment to `local`, or back
//   accumulate:TYPE          segment += scale * source; the source is another segment, and scale is
//                            0.5, or 1 for integers
//   add:TYPE                 the same, after a write of `local` to the source
//   fetch_add                adds 1 to the segment's first cell
//   memcpy:read, memcpy:write, copy_bytes:read, copy_bytes:write
//                            copies as read and write do, by that function; only with shm
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

  // Connects, and allocates temporary segments.
  ClientLoop(const box::client::ClientOptions& options, std::span<std::byte> local);

  // Throws Error(kInvalid) if the name is unknown.
  Action action(const std::string& name);

  // Called before the measurement, to detect a client that is fast because it does nothing. Both
  // throw Error(kMismatch).
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
