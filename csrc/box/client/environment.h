// Which box a process uses when the environment says so.
//
// Threads: any, as long as none changes the environment.
#pragma once

#include <string>

#include "box/client/options.h"

namespace hbm::client {

// HBMCOMM_TOKEN, else what is in the file HBMCOMM_TOKEN_FILE names, else in
// ~/.config/hbmcomm/token if there is one, without the line's end; else empty.
// Throws Error(kInvalid) when HBMCOMM_TOKEN_FILE cannot be read or is empty.
std::string token_from_environment();

// The box at HBMCOMM_BOX by HBMCOMM_BOX_TRANSPORT (auto), with the token above.
// Throws Error(kInvalid) when HBMCOMM_BOX is not set.
ClientOptions options_from_environment();

}  // namespace hbm::client
