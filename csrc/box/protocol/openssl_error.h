// Errors of OpenSSL.
//
// Threads: any.
#pragma once

#include <string>

namespace hbm::box::protocol {

// Throws Error(kUnavailable), whose text says that OpenSSL cannot do `what`, and the reason that
// OpenSSL gives.
[[noreturn]] void openssl_failed(const std::string& what);

}  // namespace hbm::box::protocol
