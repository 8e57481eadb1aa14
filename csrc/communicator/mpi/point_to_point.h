// send and recv.
//
// The first message carries a header and up to kFirstBytes of the tensor under the user's tag, so
// that MPI matches senders and receivers (any source included) as users expect. What is left of a
// large tensor follows in chunks, two in flight, under a tag that belongs to this transfer alone:
// transfers with the same tag cannot mix.
#pragma once

#include <cstddef>
#include <memory>

#include "communicator/mpi/communicator.h"
#include "progress/operation.h"

namespace hbm::mpi {

// REQUIRES (both): 0 <= tag < channel->communicator->user_tags(); the peer is another rank.
std::unique_ptr<Operation> make_send(ChannelPtr channel, Source in, Dtype dtype, int to, int tag);

// `*source` is set to the sender's rank once the operation is done.
std::unique_ptr<Operation> make_receive(ChannelPtr channel, Sink out, Dtype dtype, int from,
                                        int tag, std::shared_ptr<int> source);

}  // namespace hbm::mpi
