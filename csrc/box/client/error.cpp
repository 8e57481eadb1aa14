#include "box/client/error.h"

#include <utility>

namespace hbm::client {
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

Failure failure(smb::Status status, const std::string& asked, const std::string& cause) {
  const std::string message =
      asked + ": " + (cause.empty() ? smb::status_name(status) : cause.c_str());
  switch (status) {
    case smb::Status::kDenied:
    case smb::Status::kReadOnly:
      return failure(Cause::kDenied, message);
    case smb::Status::kNoSuchKey:
      return failure(Cause::kNoSuchKey, message);
    case smb::Status::kExists:
      return failure(Cause::kKeyInUse, message);
    case smb::Status::kNotAttached:
      return failure(Cause::kLost, message);
    case smb::Status::kSizeMismatch:
    case smb::Status::kRange:
      return plain(ErrorKind::kInvalid, message);
    case smb::Status::kUnsupported:
      return plain(ErrorKind::kUnsupported, message);
    case smb::Status::kExhausted:
      return plain(ErrorKind::kExhausted, message);
    case smb::Status::kOk:
    case smb::Status::kMalformed:
    case smb::Status::kExpired:
    case smb::Status::kClosing:
    case smb::Status::kInternal:
      break;
  }
  return failure(Cause::kRefused, message);
}

}  // namespace hbm::client
