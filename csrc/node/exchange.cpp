#include "node/exchange.h"

#include <utility>

#include "reduce/copy.h"

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

void Exchange::deliver(size_t round) {
  for (size_t step = 1; step < team_->size(); ++step) {
    const size_t peer = (team_->self() + step) % team_->size();
    const Part came = part(peer, round);
    if (came.data == nullptr || came.bytes == 0) continue;
    copy_bytes(static_cast<std::byte*>(sinks_[peer].data) + came.offset, came.data, came.bytes);
  }
}

}  // namespace hbm::node
