// Low-rank approximations of gradients: the products of a bucket's matrices with their factors
// (kernels/thin_products.h), the bases of these, and what prepares both: transposed kernels and
// rows of norm 1.
//
// Tensors are float32, contiguous and in the memory of the CPU: a matrix is [rows, columns], its
// factors are L, [rows, rank], and Rᵀ, [rank, columns]. Lists have one of each for every matrix.
// The bits do not depend on the number of threads; other processors may round otherwise.
//
// Threads: callable from any; the work is shared by PyTorch's intra-op threads. No two calls at a
// time on memory that one of them writes.
// Errors: Error(kInvalid) for tensors that do not fit, which changes none of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace hbm::low_rank {

using Tensors = std::vector<at::Tensor>;

// left = factor * matrix rightᵀ
void find_lefts(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                double factor);

// right = factor * leftᵀ matrix
void find_rights(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                 double factor);

// matrix = factor * left right
void set_matrices(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                  double factor);

// matrix = matrix + factor * left right
void add_to_matrices(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                     double factor);

// sources[i] is blocks of rows[i] x columns[i] elements, each of which is written to targets[i] as
// columns x rows. All are flat; sources and targets lie apart.
void transpose_blocks(const Tensors& sources, const Tensors& targets,
                      const std::vector<int64_t>& rows, const std::vector<int64_t>& columns);

// Multiplies each row of the matrices, so that its norm is 1; a row of zeros stays as it is.
// REQUIRES: elements whose squares and their sums are finite.
void normalize_rows(const Tensors& matrices);

// Tensors of the same shapes whose columns are orthonormal and span those of `lefts`, also where
// these depend on each other. REQUIRES: `lefts` are finite.
Tensors bases(const Tensors& lefts);

}  // namespace hbm::low_rank
