// The errors of a client, by their cause. An invalid argument is a plain Error of kInvalid. A full
// pool is a plain Error of kExhausted.
#pragma once

#include <optional>
#include <string>

#include "base/error.h"
#include "box/protocol/protocol.h"

namespace hbm::box::client {

class BoxError : public Error {
 public:
  enum class Cause {
    kRefused,      // refused by the box, and no cause below applies
    kLost,         // the segment is gone: the box restarted without its data, or lost that key
    kUnreachable,  // no connection for longer than reconnect_timeout; or the lease ended, and the
                   // box may have executed the request
    kDenied,       // wrong token, refused user, or no right to write
    kNoSuchKey,
    kKeyInUse,
    kTimeout,  // the timeout of the operation is over
    kClosed,   // close() was called
  };

  BoxError(Cause cause, const std::string& message)
      : Error(cause == Cause::kTimeout ? ErrorKind::kTimeout : ErrorKind::kNetwork, message),
        cause_(cause) {}
  Cause cause() const noexcept { return cause_; }

 private:
  Cause cause_;
};

// An operation's error. Each thread that asks for the outcome of the operation throws it.
struct Failure {
  ErrorKind kind = ErrorKind::kNetwork;
  std::optional<BoxError::Cause> cause;  // none: a plain Error
  std::string message;

  [[noreturn]] void raise() const;
};
Failure failure(BoxError::Cause cause, std::string message);

// Returns the failure for a reply's status (not kOk). `asked`: the operation; `cause`: the text of
// the box.
Failure failure(protocol::Status status, const std::string& asked, const std::string& cause);

}  // namespace hbm::box::client
