// The directory of a store: its lock, its generation, and the names of its files.
//
// Errors: Error(kUnavailable) if the kernel fails, Error(kExhausted) if the disk is full.
//
// Threads: any, after the constructor.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/descriptor.h"
#include "box/protocol/protocol.h"
#include "box/server/storage/segment_footer.h"

namespace hbm::box::server::storage {

std::string hex(const protocol::Id& id);  // 32 digits

class Directory {
 public:
  // Locks the directory until this object is destroyed; creates it if it is missing. With `sync`,
  // reserve_segment() returns when the segment's file is on the disk, and discard() returns when a
  // file that it moved to lost/ is on the disk.
  //
  // Throws Error(kInvalid) if the directory is no store, Error(kUnavailable) if another process
  // uses it, or it is damaged or of another version. Changes no existing file.
  Directory(const std::string& path, bool sync);

  protocol::Id generation() const noexcept { return generation_; }
  const std::string& path() const noexcept { return path_; }

  std::string state() const { return path_ + "/state"; }
  std::string catalogue() const { return path_ + "/journal"; }

  // Returns true if no box has created the store yet: `state` is missing then. Throws
  // Error(kUnavailable) if `state` is missing and other files of a store exist.
  bool is_new() const;
  void make_segments() const;  // the subdirectory segments/

  // The name of a segment's file relative to this directory, and its path.
  std::string segment_name(const protocol::Id& key, uint64_t serial) const;
  std::string segment_file(const protocol::Id& key, uint64_t serial) const;

  std::map<uint64_t, std::string> segment_files() const;  // paths of all segment files, by serial
  uint64_t last_serial() const;                           // largest in segments/ and lost/, or 0

  // Creates a zero-filled file for a segment of `bytes`. reserve_segment() allocates its disk space
  // and writes its footer.
  Descriptor make_segment(const std::string& file, uint64_t bytes) const;
  void reserve_segment(int fd, const std::string& file, const SegmentFooter& footer) const;

  // Removes a segment's file, or, if `keep` is true, moves it to lost/.
  void discard(const std::string& file, bool keep) const;

  // Removes `checksums`, and unfinished replacements of files that an earlier box left.
  void remove_leftovers() const;

  // Returns when names added to segments/ or removed from it are on the disk.
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
  protocol::Id generation_;
};

}  // namespace hbm::box::server::storage
