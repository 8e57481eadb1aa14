// The label of a segment's file in a store: its last page, behind the segment's memory, says which
// segment of which store it is, so that no file is taken for another.
//
// Errors: Error(kUnavailable) when the kernel refuses, Error(kExhausted) when the disk is full.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <string>

#include "box/protocol/protocol.h"

namespace hbm::box {

struct SegmentLabel {
  smb::Id contents;  // of the store
  smb::Id key;
  uint64_t serial = 0;
  uint64_t size = 0;  // bytes of the segment

  friend bool operator==(const SegmentLabel&, const SegmentLabel&) = default;
};

// The size of the file of a segment of `size` bytes, its label included.
uint64_t labelled_bytes(uint64_t size) noexcept;

// REQUIRES: the file has labelled_bytes(label.size).
void write_label(int fd, const SegmentLabel& label, const std::string& path);

bool has_label(int fd, const SegmentLabel& label, const std::string& path);

// Whether the file has never been a client's: all but a label is zeros, or not there.
bool is_blank(int fd, const std::string& path);

}  // namespace hbm::box
