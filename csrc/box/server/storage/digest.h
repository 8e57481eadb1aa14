// SHA-256 digests of the files of a closed store, and the file `checksums`, which lists them in the
// format of sha256sum: `sha256sum --check checksums` verifies them too.
//
// Errors: Error(kUnavailable) if the kernel or OpenSSL fails, Error(kExhausted) if the disk is
// full.
//
// Threads: any. Several threads read the files; each file is read by one thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace hbm::box::server::storage {

using Digest = std::array<std::byte, 32>;

Digest digest_of(std::span<const std::byte> bytes);

// Writes the digests of `files` to the file `checksums` in `directory`. `files`: paths relative to
// `directory`. The files, their names and `checksums` are on the disk when the function returns.
// Returns the digest of `checksums`.
Digest write_checksums(const std::string& directory, const std::vector<std::string>& files);

// Verifies and returns the files that `checksums` lists. Throws Error(kUnavailable), naming the
// file, if one is missing or has another digest, or if `checksums` does not have the digest
// `expected`.
std::set<std::string> verify_checksums(const std::string& directory, const Digest& expected);

}  // namespace hbm::box::server::storage
