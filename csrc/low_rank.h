// Low-rank approximations of gradients. Computes the products of a bucket's matrices with their
// factors (kernels/tall_skinny_products.h), and the bases of the factors. Two functions prepare the
// matrices: one transposes the kernels of convolutions, one scales rows to norm 1.
//
// Tensors are float32, contiguous and in the memory of the CPU. A matrix is [rows, columns]; its
// factors are L, [rows, rank], and Rᵀ, [rank, columns]. Lists of factors have one L or one Rᵀ for
// each matrix. The bits do not depend on the number of threads; other processors may round
// differently.
//
// Threads: any thread may call the functions. PyTorch's intra-op threads share the work. REQUIRES:
// no other call uses memory that a call writes. Errors: Error(kInvalid) for unsuitable tensors,
// before any tensor is changed.
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

// Transposes blocks. sources[i] consists of blocks of rows[i] x columns[i] elements, each of which
// is written to targets[i] as columns x rows. All tensors are flat; sources and targets do not
// overlap.
void transpose_blocks(const Tensors& sources, const Tensors& targets,
                      const std::vector<int64_t>& rows, const std::vector<int64_t>& columns);

// Scales each row of the matrices to norm 1; a row of zeros does not change. REQUIRES: squares of
// elements, and their sums, are finite.
void normalize_rows(const Tensors& matrices);

// Orthonormalises the columns of each tensor, even if they are linearly dependent. Returns new
// tensors of the same shapes; their columns span the columns of `lefts`. REQUIRES: `lefts` are
// finite.
Tensors bases(const Tensors& lefts);

}  // namespace hbm::low_rank
