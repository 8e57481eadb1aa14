#include "communicator/shm/stream_exchange.h"

#include <algorithm>
#include <utility>

#include "kernels/copy.h"

namespace hbm::shm {
namespace {

std::vector<size_t> counts(const std::vector<Sink>& sinks) {
  std::vector<size_t> found;
  for (const Sink& sink : sinks) found.push_back(sink.count);
  return found;
}

}  // namespace

StreamExchange::StreamExchange(std::shared_ptr<ShmGroup> shm_group, const Signature& signature,
                               size_t count, std::vector<Source> outgoing,
                               std::vector<Sink> incoming, Cast cast)
    : Streams(shm_group, signature, count, outgoing, counts(incoming), cast),
      own_source_(outgoing[shm_group->self()]),
      sinks_(std::move(incoming)) {}

void StreamExchange::begin() {
  Streams::begin();
  const Sink& own = sinks_[shm_group_->self()];
  if (own.count > 0 && own.data != own_source_.data) {
    copy_bytes(own.data, own_source_.data, own.count * element());
  }
}

bool StreamExchange::deliver(size_t round) {
  size_t room = kBytesAPoll;
  for (; distance_ < shm_group_->size(); ++distance_) {
    const size_t peer = (shm_group_->self() + distance_) % shm_group_->size();
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

}  // namespace hbm::shm
