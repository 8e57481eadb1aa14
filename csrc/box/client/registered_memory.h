// Local memory that transfers use repeatedly, registered with the current transport. Transfers over
// verbs from and to such memory need no copy.
//
// Threads: any; register_with() only by the progress engine. If a transport fails to register
// memory, the failure is logged, and transfers copy the data.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "box/transport/transport.h"

namespace hbm::box::client {

class RegisteredMemory {
 public:
  // Registers the memory until the returned pointer is destroyed. The memory must stay mapped until
  // then.
  std::shared_ptr<void> add(std::byte* memory, uint64_t bytes);

  // Registers all memory that is not registered with the transport yet. Called before the transport
  // is used.
  void register_with(transport::Transport& transport);

  // Marks all memory as unregistered, for a new transport.
  void renew();

 private:
  class Registration;

  std::atomic<bool> stale_{false};  // true: memory may be unregistered; set with mutex_ locked
  std::mutex mutex_;                // guards all_; locked before a Registration's mutex
  std::vector<std::weak_ptr<Registration>> all_;
};

}  // namespace hbm::box::client
