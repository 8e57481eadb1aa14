// SHA-256 of the files of a store at rest, and the file `checksums`, which lists them as sha256sum
// does: `sha256sum --check checksums` looks at them too.
//
// Errors: Error(kUnavailable) when the kernel or OpenSSL refuses, Error(kExhausted) when the disk
// is full.
//
// Threads: any. Files are read by several threads, each file by one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace hbm::box {

using Digest = std::array<std::byte, 32>;

Digest digest_of(std::span<const std::byte> bytes);

// Writes the digests of those files of `directory` (by their paths in it) to its file `checksums`.
// They, their digests and their names are on the disk afterwards. Returns the digest of
// `checksums`.
Digest write_checksums(const std::string& directory, const std::vector<std::string>& files);

// Returns the files that `checksums` lists, which all have their digests.
// Throws Error(kUnavailable), naming the file, when one is missing or has another, or when
// `checksums` does not have the digest `expected`.
std::set<std::string> verify_checksums(const std::string& directory, const Digest& expected);

}  // namespace hbm::box
