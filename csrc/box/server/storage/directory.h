// The directory of a store: who has it, whose contents it has, and what its files are called.
//
// Errors: Error(kUnavailable) when the kernel refuses, Error(kExhausted) when the disk is full.
//
// Threads: any, after the constructor.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/descriptor.h"
#include "box/protocol/protocol.h"

namespace hbm::box {

std::string hex(const smb::Id& id);  // 32 digits

class Directory {
 public:
  // Takes the directory, which is made if it is not there, until this object goes. With `sync`, the
  // disk has what a member makes before it returns.
  // Throws Error(kInvalid) when it has something else in it than a store, Error(kUnavailable) when
  // another process has it or it has another version.
  Directory(const std::string& path, bool sync);

  smb::Id contents() const noexcept { return contents_; }

  std::string journal() const { return path_ + "/journal"; }

  std::string segment_file(const smb::Id& key, uint64_t serial) const;
  std::map<uint64_t, std::string> segment_files() const;  // those that are there, by serial
  uint64_t last_serial() const;                           // of all files, also those in lost/

  // A new file of that size, full of zeros, which has no room on the disk yet.
  Descriptor make_segment(const std::string& file, uint64_t bytes) const;
  void reserve_segment(int fd, const std::string& file, uint64_t bytes) const;

  // Removes a segment's file, or, to be on the safe side, moves it to lost/.
  void discard(const std::string& file, bool keep) const;

 private:
  std::string segments() const { return path_ + "/segments"; }
  std::string lost() const { return path_ + "/lost"; }
  void lock();
  void identify();

  const std::string path_;
  const bool sync_;
  Descriptor lock_;
  smb::Id contents_;
};

}  // namespace hbm::box
