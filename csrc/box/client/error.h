// The errors of a client, by their cause. Bad arguments are plain Errors of kInvalid, and a full
// pool is one of kExhausted.
#pragma once

#include <optional>
#include <string>

#include "base/error.h"
#include "box/protocol/protocol.h"

namespace hbm::client {

class BoxError : public Error {
 public:
  enum class Cause {
    kRefused,      // the box said no, and none of the causes below fits
    kLost,         // the segment is gone: the box restarted without its data, or lost that key
    kUnreachable,  // no connection for longer than the client was told to wait, or than its lease
    kDenied,       // the token, the user, or the right to write
    kNoSuchKey,
    kKeyInUse,
    kTimeout,  // the operation's own time is over
    kClosed,   // close() was called
  };

  BoxError(Cause cause, const std::string& message)
      : Error(cause == Cause::kTimeout ? ErrorKind::kTimeout : ErrorKind::kNetwork, message),
        cause_(cause) {}
  Cause cause() const noexcept { return cause_; }

 private:
  Cause cause_;
};

// An error that has yet to be thrown, by each thread that asks for the outcome.
struct Failure {
  ErrorKind kind = ErrorKind::kNetwork;
  std::optional<BoxError::Cause> cause;  // none: a plain Error
  std::string message;

  [[noreturn]] void raise() const;
};
Failure failure(BoxError::Cause cause, std::string message);

// Returns the failure that a reply's status (not kOk) stands for. `asked`: the operation; `cause`:
// the box's words.
Failure failure(smb::Status status, const std::string& asked, const std::string& cause);

}  // namespace hbm::client
