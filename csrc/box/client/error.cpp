#include "box/client/error.h"

#include <utility>

namespace hbm::box::client {
namespace {

using Cause = BoxError::Cause;

Failure plain(ErrorKind kind, std::string message) { return {kind, {}, std::move(message)}; }

}  // namespace

void Failure::raise() const {
  if (cause) throw BoxError(*cause, message);
  throw Error(kind, message);
}

Failure failure(Cause cause, std::string message) {
  return {ErrorKind::kNetwork, cause, std::move(message)};
}

Failure failure(protocol::Status status, const std::string& asked, const std::string& cause) {
  const std::string message =
      asked + ": " + (cause.empty() ? protocol::status_name(status) : cause.c_str());
  switch (status) {
    case protocol::Status::kDenied:
    case protocol::Status::kReadOnly:
      return failure(Cause::kDenied, message);
    case protocol::Status::kNoSuchKey:
      return failure(Cause::kNoSuchKey, message);
    case protocol::Status::kExists:
      return failure(Cause::kKeyInUse, message);
    case protocol::Status::kNotAttached:
      return failure(Cause::kLost, message);
    case protocol::Status::kSizeMismatch:
    case protocol::Status::kRange:
      return plain(ErrorKind::kInvalid, message);
    case protocol::Status::kUnsupported:
      return plain(ErrorKind::kUnsupported, message);
    case protocol::Status::kExhausted:
      return plain(ErrorKind::kExhausted, message);
    case protocol::Status::kOk:
    case protocol::Status::kMalformed:
    case protocol::Status::kExpired:
    case protocol::Status::kClosing:
    case protocol::Status::kInternal:
      break;
  }
  return failure(Cause::kRefused, message);
}

}  // namespace hbm::box::client
