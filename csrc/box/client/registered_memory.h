// Local memory that transfers use again and again, made known to the link that stands: a transport
// that needs its memory registered (verbs) then moves it without a copy.
//
// Threads: any; bring_to() by the driver alone. A link that cannot take memory says so in the log,
// and its transfers are copied.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "box/transport/transport.h"

namespace hbm::client {

class RegisteredMemory {
 public:
  // Until the pointer goes; the memory has to stay mapped as it is that long.
  std::shared_ptr<void> add(std::byte* memory, uint64_t bytes);

  // Before the link is used: tells it of all that it does not know.
  void bring_to(transport::Transport& link);

  // There is another link from now on, which knows nothing.
  void renew();

 private:
  class Adoption;

  std::atomic<bool> stale_{false};  // there may be something to tell; set with mutex_ locked
  std::mutex mutex_;                // guards all_; before an Adoption's own
  std::vector<std::weak_ptr<Adoption>> all_;
};

}  // namespace hbm::client
