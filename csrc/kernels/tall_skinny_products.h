// Products of a matrix with the two factors of a low-rank approximation, M ≈ L Rᵀ. The factors are
// tall and skinny: they have `rank` columns. `left` is L and `right` is Rᵀ. All are float32, stored
// row by row.
//
// Each element is a sum in float32. The order and the rounding of the sum depend only on the
// processor's vectors. So an element has the same bits for every division of a product among
// threads.
//
// Threads: all functions are pure and may run concurrently, each for its own part. Alignment is not
// needed. Written memory overlaps no memory that is read. Errors: as reduce_isa() (reduce.h).
#pragma once

#include <cstddef>

namespace hbm::kernels {

struct TallSkinnyProduct {
  float* matrix;  // rows x columns
  float* left;    // rows x rank
  float* right;   // rank x columns
  size_t rows;
  size_t columns;
  size_t rank;
  float factor;
};

// Threads that share a product begin their parts at multiples of kTallSkinnyPartRows or
// kTallSkinnyPartColumns (tuning.h), so that the parts fill the processor's vectors.

// left = factor * M rightᵀ, for the rows from `begin` up to `end`.
void find_left(const TallSkinnyProduct& product, size_t begin, size_t end);

// right = factor * leftᵀ M, for the columns from `begin` up to `end`.
void find_right(const TallSkinnyProduct& product, size_t begin, size_t end);

// M = factor * left right, for the rows from `begin` up to `end`.
void set_matrix(const TallSkinnyProduct& product, size_t begin, size_t end);

// M = M + factor * left right, for the rows from `begin` up to `end`.
void add_to_matrix(const TallSkinnyProduct& product, size_t begin, size_t end);

// Writes `from`, rows x columns, to `to` as columns x rows.
void transpose(float* to, const float* from, size_t rows, size_t columns);

// Divides a vector by its norm, unless the norm is 0. REQUIRES: squares of elements, and their sum,
// are finite.
void normalize(float* vector, size_t count);

// Replaces the columns, each of which is contiguous, by orthonormal columns. The span of the new
// columns contains the span of the old ones. Uses Householder's reflections (LAPACK's SGEQRF and
// SORGQR), so that the result is orthonormal even for linearly dependent columns. REQUIRES: rank <=
// rows; squares of elements, and their sums, are finite.
void orthonormalize(float* columns, size_t rows, size_t rank);

}  // namespace hbm::kernels
