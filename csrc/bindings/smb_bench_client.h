// A client of a memory box that repeats an operation and takes the time, with no Python in between.
//
// Actions, by name, each on all bytes of `local` and of a segment as large:
//   read, write              box to local, local to box
//   accumulate TYPE          segment += scale * source, another segment; scale is 0.5, and 1 for
//                            integers
//   add TYPE                 the same, after a write of local to the source
//   fetch_add                1, to the segment's first cell
//   memcpy read, memcpy write, copy_bytes read, copy_bytes write
//                            the same copies by hand; shm alone
//
// Threads: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "smb_client.h"

namespace hbm {

class ClientLoop {
 public:
  // Connects, and allocates segments that go with this client.
  ClientLoop(const client::ClientOptions& options, std::span<std::byte> local);

  const char* transport() const { return client::transport_name(client_.transport()); }

  // Seconds that `calls` times the action took, one after the other.
  double run(const std::string& action, int calls);

  // The nanoseconds of each.
  std::vector<double> times(const std::string& action, int calls);

  // Reads and writes pieces in turn, going round the segment, between two times of the steady
  // clock, in seconds. The bytes of those that were over before the end.
  uint64_t mixed(double begin, double end, uint64_t piece);

 private:
  using Action = std::function<void()>;

  Action action(const std::string& name);
  Action copy(const std::string& name);
  Action accumulate(const std::string& dtype, bool write_first);
  const client::Segment& source();

  client::Client client_;
  const std::span<std::byte> local_;
  const client::Segment segment_;
  std::optional<client::Segment> source_;
};

}  // namespace hbm
