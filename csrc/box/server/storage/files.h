// The file operations of a store, with errors that name the file.
//
// All throw Error(kUnavailable) when the kernel refuses, Error(kExhausted) when the disk is full.
//
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/descriptor.h"

namespace hbm::box {

// A new file is for its owner alone.
Descriptor open_file(const std::string& path, int flags);

uint64_t file_bytes(int fd, const std::string& path);

// Gives a file room on the disk, and at least that size: memory that is mapped to a file without
// room kills by SIGBUS when it is first written.
void reserve_file(int fd, uint64_t bytes, const std::string& path);

// Returns how many bytes there were, at most `size`.
size_t read_file(int fd, void* bytes, size_t size, const std::string& path);

void write_file(int fd, const void* bytes, size_t size, const std::string& path);  // at the end
void resize_file(int fd, uint64_t bytes, const std::string& path);
void sync_file(int fd, const std::string& path);

// The file of that name is from here on the one at `from`, or still the old one if the process or,
// with `sync`, the host stops meanwhile.
void replace_file(const std::string& from, const std::string& path, bool sync);

// Names that were added or removed in it are on the disk.
void sync_directory(const std::string& path);

}  // namespace hbm::box
