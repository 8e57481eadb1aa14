// Proofs that the other end knows the box's token, which itself is never sent, and the keys that
// come of it.
//
// A proof is the HMAC-SHA-256, keyed with the token, of both ends' nonces and of what the frame
// claims, so that one that was overheard proves nothing on another connection. The box and its
// clients hash different labels: neither can answer with the other's proof.
//
// Threads: every function may be called from any thread. All but equal() throw Error(kUnavailable)
// when OpenSSL fails.
#pragma once

#include <string_view>

#include "box/protocol/protocol.h"
#include "box/protocol/seal.h"

namespace hbm::smb {

Nonce random_nonce();
Id random_id();  // never none

// Stands for `id` where others may see it: the first 128 bits of a SHA-256, from which nobody
// finds the id.
Id fingerprint(const Nonce& salt, const Id& id);

// The values of Join::proof and Joined::proof; all else in the frames has its value already. Zeros
// when `token` is empty.
Proof client_proof(std::string_view token, const Hello& hello, const Join& join);
Proof server_proof(std::string_view token, const Hello& hello, const Join& join,
                   const Joined& joined);

// The keys of one connection, which `hello` and `join` opened: HKDF with SHA-256 of the token, with
// both nonces as its salt, and for each direction another label.
// REQUIRES: a token, which both ends have proved.
SealKeys seal_keys(std::string_view token, const Hello& hello, const Join& join);

// Says that one end seals what tcp carries, and the other does not: `client` is whether it is the
// client that does.
const char* seal_mismatch(bool client) noexcept;

// Takes the same time wherever they differ.
bool equal(const Proof& left, const Proof& right) noexcept;

}  // namespace hbm::smb
