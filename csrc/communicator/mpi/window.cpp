#include "communicator/mpi/window.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/tuning.h"
#include "communicator/mpi/tuning.h"

namespace hbm::communicator::mpi {

bool is_distant(const Channel& channel) {
  return channel.round_trip && channel.round_trip() >= kDistantRoundTrip;
}

size_t rounds_in_flight(const Channel& channel, size_t bytes) {
  // Further rounds are not necessary, so they must not use up memory that another operation needs.
  if (!channel.round_trip || !channel.staging->overflows()) return kLeastInFlight;
  const std::chrono::duration<double> round_trip = channel.round_trip();
  const auto link = static_cast<size_t>(round_trip.count() * kDistantBytesPerSecond);
  // Twice, because about half of the staging memory is for messages of one direction.
  const size_t most =
      std::min<size_t>({2 * link, kMostOperationBytes, channel.staging->budget_bytes()});
  return std::max(kLeastInFlight, most / std::max<size_t>(bytes, 1));
}

memory::StagingBuffer spare_memory(const Channel& channel, size_t bytes) try {
  return channel.staging->acquire_within_budget(bytes);
} catch (const Error& error) {
  if (error.kind() != ErrorKind::kExhausted) throw;
  return {};
}

}  // namespace hbm::communicator::mpi
