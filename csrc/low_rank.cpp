#include "low_rank.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>

#include "base/error.h"
#include "kernels/thin_products.h"

namespace hbm::layerdrop {
namespace {

constexpr std::array<int64_t, 2> kNoSizes{};

// Those of a matrix; zeros for what is none, which check() refuses.
at::IntArrayRef sizes_of(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor.sizes() : at::IntArrayRef(kNoSizes);
}

void check(const at::Tensor& tensor, const char* list, size_t index, at::IntArrayRef shape) {
  if (tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous() &&
      tensor.sizes() == shape) {
    return;
  }
  std::ostringstream text;
  text << list << "[" << index << "] is " << c10::toString(tensor.scalar_type()) << " "
       << tensor.sizes() << " with the strides " << tensor.strides() << " on "
       << tensor.device().str() << "; it must be contiguous float32 " << shape << " on the CPU";
  throw Error(ErrorKind::kInvalid, text.str());
}

std::vector<ThinProduct> products_of(const Tensors& matrices, const Tensors& lefts,
                                     const Tensors& rights, double factor) {
  if (lefts.size() != matrices.size() || rights.size() != matrices.size()) {
    std::ostringstream text;
    text << matrices.size() << " matrices have " << lefts.size() << " left and " << rights.size()
         << " right factors; pass one of each for every matrix";
    throw Error(ErrorKind::kInvalid, text.str());
  }
  std::vector<ThinProduct> products;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto sizes = sizes_of(matrices[i]);
    const int64_t rank = sizes_of(lefts[i])[1];
    check(matrices[i], "matrices", i, sizes);
    check(lefts[i], "lefts", i, {sizes[0], rank});
    check(rights[i], "rights", i, {rank, sizes[1]});
    products.push_back({
        .matrix = matrices[i].mutable_data_ptr<float>(),
        .left = lefts[i].mutable_data_ptr<float>(),
        .right = rights[i].mutable_data_ptr<float>(),
        .rows = static_cast<size_t>(sizes[0]),
        .columns = static_cast<size_t>(sizes[1]),
        .rank = static_cast<size_t>(rank),
        .factor = static_cast<float>(factor),
    });
  }
  return products;
}

// A part of a list's work, which one thread does.
struct Portion {
  size_t index;  // in the list
  size_t begin;
  size_t end;
  int64_t work;  // multiplications, at least 1
};

constexpr int64_t kLeastWork = 1 << 19;  // for which another thread is woken

// Each thread has an equal part of the work, but for the last of its portions.
template <class Work>
void share_out(const std::vector<Portion>& portions, Work work) {
  std::vector<int64_t> ends;
  int64_t total = 0;
  for (const Portion& portion : portions) ends.push_back(total += portion.work);
  at::parallel_for(0, total, kLeastWork, [&](int64_t begin, int64_t end) {
    auto at = std::ranges::upper_bound(ends, begin) - ends.begin();
    if (begin > (at == 0 ? 0 : ends[at - 1])) ++at;  // it begins in the part before
    for (; at < std::ssize(ends) && ends[at] - portions[at].work < end; ++at) work(portions[at]);
  });
}

using Part = void (*)(const ThinProduct& product, size_t begin, size_t end);

// By rows, or by columns, of the matrices.
void share_out(const std::vector<ThinProduct>& products, bool by_rows, Part part) {
  std::vector<Portion> portions;
  for (size_t index = 0; index < products.size(); ++index) {
    const ThinProduct& product = products[index];
    const size_t all = by_rows ? product.rows : product.columns;
    const size_t step = by_rows ? kThinRows : kThinColumns;
    for (size_t begin = 0; begin < all; begin += step) {
      const size_t end = std::min(begin + step, all);
      const size_t width = by_rows ? product.columns : product.rows;
      portions.push_back(
          {index, begin, end, static_cast<int64_t>((end - begin) * width * product.rank + 1)});
    }
  }
  share_out(portions, [&](const Portion& portion) {
    part(products[portion.index], portion.begin, portion.end);
  });
}

// Calls copy(row, column) for every element, a line of the cache at a time.
template <class Copy>
void for_transposed(int64_t rows, int64_t columns, Copy copy) {
  constexpr int64_t kLine = 64 / sizeof(float);
  for (int64_t first = 0; first < rows; first += kLine) {
    const int64_t end = std::min(first + kLine, rows);
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t row = first; row < end; ++row) copy(row, column);
    }
  }
}

// `left`, rows x rank, with columns that are orthonormal. The largest element is brought to 1
// first, so that squares are finite.
void make_basis(float* basis, const float* left, int64_t rows, int64_t rank) {
  float most = 0;
  for (int64_t i = 0; i < rows * rank; ++i) most = std::max(most, std::abs(left[i]));
  const float factor = most < std::numeric_limits<float>::min() ? 0 : 1 / most;
  std::vector<float> columns(static_cast<size_t>(rows * rank));
  for_transposed(rows, rank, [&](int64_t row, int64_t k) {
    columns[k * rows + row] = left[row * rank + k] * factor;
  });
  orthonormalize(columns.data(), static_cast<size_t>(rows), static_cast<size_t>(rank));
  for_transposed(rows, rank,
                 [&](int64_t row, int64_t k) { basis[row * rank + k] = columns[k * rows + row]; });
}

}  // namespace

void find_lefts(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                double factor) {
  share_out(products_of(matrices, lefts, rights, factor), /*by_rows=*/true, &find_left);
}

void find_rights(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                 double factor) {
  share_out(products_of(matrices, lefts, rights, factor), /*by_rows=*/false, &find_right);
}

void set_matrices(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                  double factor) {
  share_out(products_of(matrices, lefts, rights, factor), /*by_rows=*/true, &set_matrix);
}

void add_to_matrices(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                     double factor) {
  share_out(products_of(matrices, lefts, rights, factor), /*by_rows=*/true, &add_to_matrix);
}

Tensors bases(const Tensors& lefts) {
  std::vector<Portion> portions;
  for (size_t i = 0; i < lefts.size(); ++i) {
    const auto sizes = sizes_of(lefts[i]);
    check(lefts[i], "lefts", i, sizes);
    if (sizes[1] > sizes[0]) {
      std::ostringstream text;
      text << "lefts[" << i << "] is " << sizes << ", which has more columns than rows";
      throw Error(ErrorKind::kInvalid, text.str());
    }
    portions.push_back({i, 0, 0, 4 * sizes[0] * sizes[1] * sizes[1] + 1});
  }
  Tensors found;
  for (const at::Tensor& left : lefts) found.push_back(at::empty_like(left));
  share_out(portions, [&](const Portion& portion) {
    const at::Tensor& left = lefts[portion.index];
    make_basis(found[portion.index].mutable_data_ptr<float>(), left.const_data_ptr<float>(),
               left.size(0), left.size(1));
  });
  return found;
}

}  // namespace hbm::layerdrop
