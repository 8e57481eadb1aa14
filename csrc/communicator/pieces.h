// Streams that lie in several places: what one rank has for another may be scattered over the
// tensors of an operation, and yet travels as one. A stream is the sequence of its pieces.
//
// Threads: pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "communicator/communicator.h"

namespace hbm {

using Sources = std::vector<Source>;
using Sinks = std::vector<Sink>;

// Returns the part of `whole` in `range`, as far as it reaches.
inline Source part_of(const Source& whole, ElementRange range, size_t element) {
  return {static_cast<const std::byte*>(whole.data) + range.offset * element,
          std::min(range.count, whole.count - range.offset)};
}

inline Sink part_of(const Sink& whole, ElementRange range, size_t element) {
  return {static_cast<std::byte*>(whole.data) + range.offset * element,
          std::min(range.count, whole.count - range.offset)};
}

// The same part of each.
template <class Piece>
std::vector<Piece> parts_of(const std::vector<Piece>& wholes, ElementRange range, size_t element) {
  std::vector<Piece> parts;
  for (const Piece& whole : wholes) parts.push_back(part_of(whole, range, element));
  return parts;
}

// Elements of all pieces.
template <class Piece>
size_t count_of(const std::vector<Piece>& pieces) {
  size_t count = 0;
  for (const Piece& piece : pieces) count += piece.count;
  return count;
}

// Calls visit(piece, start, length) for each piece that has some of the bytes [offset, offset +
// bytes) of a stream, in order: they lie at [start, start + length) of the piece. REQUIRES: the
// stream has as many.
template <class Piece, class Visit>
void visit_pieces(const std::vector<Piece>& pieces, size_t element, size_t offset, size_t bytes,
                  const Visit& visit) {
  for (const Piece& piece : pieces) {
    if (bytes == 0) return;
    const size_t whole = piece.count * element;
    if (offset >= whole) {
      offset -= whole;
      continue;
    }
    const size_t length = std::min(whole - offset, bytes);
    visit(piece, offset, length);
    bytes -= length;
    offset = 0;
  }
}

// Copies bytes of a stream to `to`, or from `from` to where they belong.
inline void gather_pieces(const Sources& pieces, size_t element, size_t offset, size_t bytes,
                          std::byte* to) {
  visit_pieces(pieces, element, offset, bytes, [&](const Source& piece, size_t start, size_t n) {
    std::memcpy(to, static_cast<const std::byte*>(piece.data) + start, n);
    to += n;
  });
}

inline void scatter_pieces(const Sinks& pieces, size_t element, size_t offset, size_t bytes,
                           const std::byte* from) {
  visit_pieces(pieces, element, offset, bytes, [&](const Sink& piece, size_t start, size_t n) {
    std::memcpy(static_cast<std::byte*>(piece.data) + start, from, n);
    from += n;
  });
}

}  // namespace hbm
