// The claim mailbox of a process. Other processes of its machine send it reports of second claims:
// the sender has come as one of the ranks of this process's group. The mailbox is a datagram socket
// with an abstract name, so only processes of the same network namespace reach it. It needs no
// store.
//
// Threads: one at a time.
#pragma once

#include <optional>
#include <string>

#include "base/descriptor.h"

namespace hbm::communicator::failure {

class ClaimMailbox {
 public:
  // Opens the mailbox with this name. If the kernel refuses, nothing arrives there.
  explicit ClaimMailbox(const std::string& name);

  // Returns a descriptor that is readable if a letter has arrived; -1 if the kernel refused.
  int descriptor() const noexcept { return socket_.get(); }

  // Returns the next letter. Does not wait.
  std::optional<std::string> receive();

  // Leaves a letter in a mailbox, if it is on this machine and has room. Does not wait.
  static void send(const std::string& name, const std::string& letter) noexcept;

 private:
  Descriptor socket_;
};

}  // namespace hbm::communicator::failure
