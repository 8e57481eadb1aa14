// A request that the box does not carry out: what the client is told.
#pragma once

#include <stdexcept>
#include <string>

#include "box/protocol/protocol.h"

namespace hbm::box {

class Refusal : public std::runtime_error {
 public:
  Refusal(smb::Status status, const std::string& cause)
      : std::runtime_error(cause), status_(status) {}
  smb::Status status() const noexcept { return status_; }

 private:
  smb::Status status_;
};

}  // namespace hbm::box
