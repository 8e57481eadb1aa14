// Proofs that a peer knows the token of the box, and the keys derived from it. The token is never
// sent.
//
// A proof is an HMAC-SHA-256 under the token. It covers the nonces of both ends, so a recorded
// proof is worthless on another connection. It also covers the ids in its frame, and in a Join the
// flags and the pid. Box and clients use different prefixes, so neither can replay the proof of the
// other.
//
// Threads: any. Every function that is not noexcept throws Error(kUnavailable) when OpenSSL fails.
#pragma once

#include <string_view>

#include "box/protocol/authenticator.h"
#include "box/protocol/protocol.h"

namespace hbm::box::protocol {

Nonce random_nonce();
Id random_id();  // never all zero

// Returns a pseudonym of `id` for other clients: the first 128 bits of a SHA-256, which does not
// reveal the id.
Id fingerprint(const Nonce& salt, const Id& id);

// Return the values of Join::proof and Joined::proof; zeros if `token` is empty. REQUIRES: all
// other fields of the structs are set.
Proof client_proof(std::string_view token, const Hello& hello, const Join& join);
Proof server_proof(std::string_view token, const Hello& hello, const Join& join,
                   const Joined& joined);

// Returns the keys of the connection that `hello` and `join` opened: HKDF-SHA-256 of the token,
// salted with both nonces, with one label per direction. REQUIRES: both ends have proved the token.
MacKeys mac_keys(std::string_view token, const Hello& hello, const Join& join);

// Returns the error text for ends that disagree on the option `seal`. `client`: true if the client
// has it on and the box has it off.
const char* authentication_mismatch(bool client) noexcept;

// Compares in constant time.
bool equal(const Proof& left, const Proof& right) noexcept;

}  // namespace hbm::box::protocol
