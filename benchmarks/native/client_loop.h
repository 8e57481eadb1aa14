// A client of a memory box, with a buffer `local` and a segment of the same size. The benchmark
// repeats one of its actions. All actions except fetch_add use the whole segment:
//   read, write              copies the segment to `local`, or `local` to the segment
//   accumulate:TYPE          segment += scale * source; the source is another segment, and scale is
//                            0.5, or 1 for integers
//   add:TYPE                 writes `local` to the source, then does accumulate:TYPE
//   fetch_add                adds 1 to the segment's first cell
//   memcpy:read, memcpy:write, copy_bytes:read, copy_bytes:write
//                            the copies of read and write, by the named function; only over shm
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

  // Connects, and allocates a temporary segment as large as `local`.
  ClientLoop(const box::client::ClientOptions& options, std::span<std::byte> local);

  // Throws Error(kInvalid) if the name is unknown.
  Action action(const std::string& name);

  // Called before the measurement, to detect a client that is fast only because it does not
  // transfer or add the data. Both functions throw Error(kMismatch) if the data are wrong.
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
