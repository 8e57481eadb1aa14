// Scatter/gather lists: one transfer made of parts of several tensors. Each entry of a list is a
// contiguous part of a tensor; the transfer is the entries in order.
//
// Threads: pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "communicator/communicator.h"

namespace hbm::communicator {

using Sources = std::vector<Source>;
using Sinks = std::vector<Sink>;

// Returns the part of `whole` in `range`, cut at the end of `whole`. `element`: bytes of an
// element. REQUIRES: range.offset <= whole.count.
inline Source part_of(const Source& whole, ElementRange range, size_t element) {
  return {static_cast<const std::byte*>(whole.data) + range.offset * element,
          std::min(range.count, whole.count - range.offset)};
}

inline Sink part_of(const Sink& whole, ElementRange range, size_t element) {
  return {static_cast<std::byte*>(whole.data) + range.offset * element,
          std::min(range.count, whole.count - range.offset)};
}

// Returns part_of() each of `wholes`.
template <class Entry>
std::vector<Entry> parts_of(const std::vector<Entry>& wholes, ElementRange range, size_t element) {
  std::vector<Entry> parts;
  for (const Entry& whole : wholes) parts.push_back(part_of(whole, range, element));
  return parts;
}

// Returns the sum of the entries' counts.
template <class Entry>
size_t count_of(const std::vector<Entry>& entries) {
  size_t count = 0;
  for (const Entry& entry : entries) count += entry.count;
  return count;
}

// Calls visit(entry, start, length), in order, for each entry that has some of the bytes [offset,
// offset + bytes) of the transfer. These are the bytes [start, start + length) of the entry.
// `element`: bytes of an element. REQUIRES: the transfer has at least offset + bytes bytes.
template <class Entry, class Visit>
void visit_entries(const std::vector<Entry>& entries, size_t element, size_t offset, size_t bytes,
                   const Visit& visit) {
  for (const Entry& entry : entries) {
    if (bytes == 0) return;
    const size_t whole = entry.count * element;
    if (offset >= whole) {
      offset -= whole;
      continue;
    }
    const size_t length = std::min(whole - offset, bytes);
    visit(entry, offset, length);
    bytes -= length;
    offset = 0;
  }
}

// Copies the bytes [offset, offset + bytes) of a transfer from its entries to `to`.
inline void gather_entries(const Sources& entries, size_t element, size_t offset, size_t bytes,
                           std::byte* to) {
  visit_entries(entries, element, offset, bytes, [&](const Source& entry, size_t start, size_t n) {
    std::memcpy(to, static_cast<const std::byte*>(entry.data) + start, n);
    to += n;
  });
}

// Copies bytes at `from` into the entries, as the bytes [offset, offset + bytes) of the transfer.
inline void scatter_entries(const Sinks& entries, size_t element, size_t offset, size_t bytes,
                            const std::byte* from) {
  visit_entries(entries, element, offset, bytes, [&](const Sink& entry, size_t start, size_t n) {
    std::memcpy(static_cast<std::byte*>(entry.data) + start, from, n);
    from += n;
  });
}

}  // namespace hbm::communicator
