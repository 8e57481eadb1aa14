// Products of a matrix with the two factors of a low-rank approximation, M ≈ L Rᵀ, which are thin:
// of `rank` columns. `left` is L and `right` is Rᵀ. All are float32 and lie row by row.
//
// Each element is a sum in float32, whose order and rounding depend on the processor's vectors, and
// on nothing else: parts of a product, by whatever threads, have the bits of the whole.
//
// Threads: all functions are pure and may run concurrently, each for a part of its own. No part
// needs alignment. What is written overlaps nothing that is read.
// Errors: as reduce_isa() (reduce.h).
#pragma once

#include <cstddef>

namespace hbm {

struct ThinProduct {
  float* matrix;  // rows x columns
  float* left;    // rows x rank
  float* right;   // rank x columns
  size_t rows;
  size_t columns;
  size_t rank;
  float factor;
};

// Threads that share a product begin their parts at multiples of kThinPartRows or kThinPartColumns
// (tuning.h), which keep a processor's vectors busy.

// left = factor * M rightᵀ, for the rows from `begin` up to `end`.
void find_left(const ThinProduct& product, size_t begin, size_t end);

// right = factor * leftᵀ M, for the columns from `begin` up to `end`.
void find_right(const ThinProduct& product, size_t begin, size_t end);

// M = factor * left right, for the rows from `begin` up to `end`.
void set_matrix(const ThinProduct& product, size_t begin, size_t end);

// M = M + factor * left right, for the rows from `begin` up to `end`.
void add_to_matrix(const ThinProduct& product, size_t begin, size_t end);

// `from`, rows x columns, is written to `to` as columns x rows.
void transpose(float* to, const float* from, size_t rows, size_t columns);

// Divides a vector by its norm, unless that is 0. REQUIRES: elements whose squares and their sum
// are finite.
void normalize(float* vector, size_t count);

// Replaces columns, each of which lies in one piece, by orthonormal ones that span them: by
// Householder's reflections, so that they are orthonormal even where columns depend on each other
// (LAPACK's SGEQRF and SORGQR). REQUIRES: rank <= rows; elements whose squares and their sums are
// finite.
void orthonormalize(float* columns, size_t rows, size_t rank);

}  // namespace hbm
