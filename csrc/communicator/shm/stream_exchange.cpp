#include "communicator/shm/stream_exchange.h"

#include <algorithm>
#include <utility>

#include "kernels/copy.h"

namespace hbm::node {
namespace {

std::vector<size_t> counts(const std::vector<Sink>& sinks) {
  std::vector<size_t> found;
  for (const Sink& sink : sinks) found.push_back(sink.count);
  return found;
}

}  // namespace

Exchange::Exchange(std::shared_ptr<Team> team, const Signature& signature, size_t count,
                   std::vector<Source> outgoing, std::vector<Sink> incoming, Cast cast)
    : Streams(team, signature, count, outgoing, counts(incoming), cast),
      own_source_(outgoing[team->self()]),
      sinks_(std::move(incoming)) {}

void Exchange::begin() {
  Streams::begin();
  const Sink& own = sinks_[team_->self()];
  if (own.count > 0 && own.data != own_source_.data) {
    copy_bytes(own.data, own_source_.data, own.count * element());
  }
}

bool Exchange::deliver(size_t round) {
  size_t room = kBytesAPoll;
  for (; distance_ < team_->size(); ++distance_) {
    const size_t peer = (team_->self() + distance_) % team_->size();
    const Part came = part(peer, round);
    const size_t slice = std::min(came.bytes - copied_, room);
    if (slice > 0) {
      copy_bytes(static_cast<std::byte*>(sinks_[peer].data) + came.offset + copied_,
                 came.data + copied_, slice);
    }
    room -= slice;
    copied_ += slice;
    if (copied_ < came.bytes) return false;
    copied_ = 0;
  }
  distance_ = 1;
  return true;
}

}  // namespace hbm::node
