// Errors of OpenSSL.
#pragma once

#include <string>

namespace hbm::smb {

// Throws Error(kUnavailable): OpenSSL cannot do `what`, with the cause that it gives.
[[noreturn]] void openssl_failed(const std::string& what);

}  // namespace hbm::smb
