#include "box/protocol/openssl_error.h"

#include <openssl/err.h>

#include "base/error.h"

namespace hbm::box::protocol {

void openssl_failed(const std::string& what) {
  char cause[256] = "it gives no cause";
  const unsigned long code = ERR_get_error();
  if (code != 0) ERR_error_string_n(code, cause, sizeof(cause));
  throw Error(ErrorKind::kUnavailable, "OpenSSL cannot " + what + ": " + cause);
}

}  // namespace hbm::box::protocol
