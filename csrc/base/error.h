// The kinds of error. Code without PyTorch throws hbm::Error, translated by bindings/errors.h and
// process_group/types.h (docs/errors.md). The place that decides an error writes its exact cause,
// once: what was asked, what was found, which rank, what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace hbm {

enum class ErrorKind {
  kInvalid,      // bad argument or option; nothing was sent          -> ValueError
  kUnsupported,  // a combination that has no meaning here            -> ValueError
  kExhausted,    // the memory asked for is not there                 -> MemoryError
  kUnavailable,  // a library or device is missing or does not fit    -> RuntimeError
  kTimeout,      // a peer did not come in time                       -> DistBackendError
  kAborted,      // abort() or an earlier failure of the group        -> DistBackendError
  kMismatch,     // ranks disagree on what operation they are in      -> DistBackendError
  kPeer,         // another rank failed                               -> DistBackendError
  kDeath,        // another rank's process has ended                  -> DistBackendError
  kNetwork,      // MPI, the store or a socket reported a failure     -> DistNetworkError
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace hbm
