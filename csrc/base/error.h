// The kinds of error. Code without PyTorch throws hbm::Error, which bindings/errors.h and
// process_group/types.h translate (docs/errors.md lists the results). The code that detects an
// error writes the error's text. The text names the failed request, the cause, the rank and the
// remedy.
#pragma once

#include <stdexcept>
#include <string>

namespace hbm {

enum class ErrorKind {
  kInvalid,      // bad argument or option; nothing was sent
  kUnsupported,  // hbm does not support these arguments together, or they have no meaning
  kExhausted,    // the requested memory is not available
  kUnavailable,  // a library or device is missing or does not fit
  kTimeout,      // a peer was not in time
  kAborted,      // abort() or an earlier failure of the group
  kMismatch,     // ranks are in different operations
  kPeer,         // another rank failed
  kDeath,        // another rank's process has ended
  kNetwork,      // MPI, the store or a socket reported a failure
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace hbm
