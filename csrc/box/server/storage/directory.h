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
#include "box/server/storage/segment_label.h"

namespace hbm::box {

std::string hex(const smb::Id& id);  // 32 digits

class Directory {
 public:
  // Takes the directory, which is made if it is not there, until this object goes. With `sync`, the
  // disk has what a member makes before it returns.
  // Throws Error(kInvalid) when it has something else in it than a store, Error(kUnavailable) when
  // another process has it, it has another version, or it is damaged. Nothing in a directory that
  // has a store, or anything else, is changed here.
  Directory(const std::string& path, bool sync);

  smb::Id contents() const noexcept { return contents_; }
  const std::string& path() const noexcept { return path_; }

  std::string state() const { return path_ + "/state"; }
  std::string catalogue() const { return path_ + "/journal"; }  // the file's name in version 2

  // Whether no box has made the rest of the store yet: only then `state` is not there.
  bool is_new() const;
  void make_segments() const;  // the folder

  // The name of a segment's file in this directory, and its path.
  std::string segment_name(const smb::Id& key, uint64_t serial) const;
  std::string segment_file(const smb::Id& key, uint64_t serial) const;

  std::map<uint64_t, std::string> segment_files()
      const;                     // paths of those that are there, by serial
  uint64_t last_serial() const;  // of all files, also those in lost/

  // A new file for a segment of that size, full of zeros, which has no room on the disk yet.
  Descriptor make_segment(const std::string& file, uint64_t bytes) const;
  void reserve_segment(int fd, const std::string& file, const SegmentLabel& label) const;

  // Removes a segment's file, or, to be on the safe side, moves it to lost/.
  void discard(const std::string& file, bool keep) const;

  // Removes what a box that stopped was about to put in the place of a file, and `checksums`.
  void remove_leftovers() const;

  // Names that were added to segments/ or removed there are on the disk.
  void sync_segments() const;

 private:
  std::string segments() const { return path_ + "/segments"; }
  std::string lost() const { return path_ + "/lost"; }
  void lock(bool make);
  void make_identity() const;
  void read_identity();
  void require_known_files() const;

  const std::string path_;
  const bool sync_;
  Descriptor lock_;
  smb::Id contents_;
};

}  // namespace hbm::box
