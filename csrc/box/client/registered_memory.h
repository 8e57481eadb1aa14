// Local memory that transfers use again and again, registered with the transport that stands: one
// that needs its memory registered (verbs) then moves it without a copy.
//
// Threads: any; register_with() by the driver alone. A transport that cannot take memory says so in
// the log, and its transfers are copied.
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
  // Registers the memory until the pointer goes; that long it has to stay mapped as it is.
  std::shared_ptr<void> add(std::byte* memory, uint64_t bytes);

  // Tells the transport of all memory that it does not know. Called before the transport is used.
  void register_with(transport::Transport& transport);

  // There is another transport from now on, which knows nothing.
  void renew();

 private:
  class Registration;

  std::atomic<bool> stale_{false};  // there may be something to tell; set with mutex_ locked
  std::mutex mutex_;                // guards all_; before a Registration's own
  std::vector<std::weak_ptr<Registration>> all_;
};

}  // namespace hbm::client
