// The windows of a group within a node (communicator/shared_window.h). A put is a copy into the
// target's segment. Each rank's part of a window has a count for each local rank and channel: the
// signals that this local rank has sent. A signal adds to its count and rings the target's doorbell
// for messages. docs/design/shared-memory.md has the memory order.
//
// The ranks in calls are local ranks, as in communicator/shm/communicator.h.
//
// Threads: any thread may call the function.
#pragma once

#include <cstddef>
#include <memory>

#include "communicator/shared_window.h"
#include "communicator/shm/shm_group.h"

namespace hbm::communicator::shm {

// Does the work of Communicator::make_window().
std::shared_ptr<SharedWindow> make_window(std::shared_ptr<ShmGroup> shm_group, const void* data,
                                          size_t bytes);

}  // namespace hbm::communicator::shm
