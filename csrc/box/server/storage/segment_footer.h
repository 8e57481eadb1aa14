// The footer of a segment's file in a store: the last page, after the segment's memory. It
// identifies the store and the segment, so that no file is mistaken for another. Its magic is
// HBMLABEL.
//
// Errors: Error(kUnavailable) if the kernel fails, Error(kExhausted) if the disk is full.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <string>

#include "box/protocol/protocol.h"

namespace hbm::box::server::storage {

struct SegmentFooter {
  protocol::Id generation;  // of the store
  protocol::Id key;
  uint64_t serial = 0;
  uint64_t size = 0;  // bytes of the segment

  friend bool operator==(const SegmentFooter&, const SegmentFooter&) = default;
};

// Returns the size of the file of a segment of `size` bytes, with its footer.
uint64_t bytes_with_footer(uint64_t size) noexcept;

// REQUIRES: the file has bytes_with_footer(footer.size) bytes.
void write_footer(int fd, const SegmentFooter& footer, const std::string& path);

bool has_footer(int fd, const SegmentFooter& footer, const std::string& path);

// Returns true if the file has only zeros, except for a footer, so that its removal loses no data.
bool is_blank(int fd, const std::string& path);

}  // namespace hbm::box::server::storage
