#include "low_rank.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>

#include "base/error.h"
#include "kernels/tall_skinny_products.h"
#include "kernels/tuning.h"

namespace hbm::low_rank {
namespace {

constexpr std::array<int64_t, 2> kNoSizes{};

// Returns the sizes of a matrix. Returns zeros for a tensor that is not a matrix; check() rejects
// it.
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

std::vector<kernels::TallSkinnyProduct> products_of(const Tensors& matrices, const Tensors& lefts,
                                                    const Tensors& rights, double factor) {
  if (lefts.size() != matrices.size() || rights.size() != matrices.size()) {
    std::ostringstream text;
    text << matrices.size() << " matrices have " << lefts.size() << " left and " << rights.size()
         << " right factors; pass one of each for every matrix";
    throw Error(ErrorKind::kInvalid, text.str());
  }
  std::vector<kernels::TallSkinnyProduct> products;
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

// A part of a list's work, done by one thread.
struct Portion {
  size_t index;  // in the list
  size_t begin;
  size_t end;
  int64_t work;  // multiplications, at least 1
};

constexpr int64_t kLeastWork = 1 << 19;         // per thread
constexpr int64_t kWorkOfCopy = 16;             // one copied element costs this many products
constexpr int64_t kCopiedPerPortion = 1 << 15;  // elements

// Runs `work` for each portion. Threads get equal shares of the work. A portion that crosses the
// end of a share belongs to the thread in whose share it begins.
template <class Work>
void share_out(const std::vector<Portion>& portions, Work work) {
  std::vector<int64_t> ends;
  int64_t total = 0;
  for (const Portion& portion : portions) ends.push_back(total += portion.work);
  at::parallel_for(0, total, kLeastWork, [&](int64_t begin, int64_t end) {
    auto at = std::ranges::upper_bound(ends, begin) - ends.begin();
    if (begin > (at == 0 ? 0 : ends[at - 1])) ++at;  // this portion begins in the previous share
    for (; at < std::ssize(ends) && ends[at] - portions[at].work < end; ++at) work(portions[at]);
  });
}

using Part = void (*)(const kernels::TallSkinnyProduct& product, size_t begin, size_t end);

// Divides the products among threads, by rows or by columns of the matrices. Calls `part` for each
// run of rows or columns.
void share_out(const std::vector<kernels::TallSkinnyProduct>& products, bool by_rows, Part part) {
  std::vector<Portion> portions;
  for (size_t index = 0; index < products.size(); ++index) {
    const kernels::TallSkinnyProduct& product = products[index];
    const size_t all = by_rows ? product.rows : product.columns;
    const size_t step = by_rows ? kernels::kTallSkinnyPartRows : kernels::kTallSkinnyPartColumns;
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

// Orthonormalises the columns of `left`, rows x rank. Scales the largest element to 1 first, so
// that squares are finite.
void make_basis(float* basis, const float* left, size_t rows, size_t rank) {
  float most = 0;
  for (size_t i = 0; i < rows * rank; ++i) most = std::max(most, std::abs(left[i]));
  const float factor = most < std::numeric_limits<float>::min() ? 0 : 1 / most;
  std::vector<float> columns(rows * rank);
  kernels::transpose(columns.data(), left, rows, rank);
  for (float& element : columns) element *= factor;
  kernels::orthonormalize(columns.data(), rows, rank);
  kernels::transpose(basis, columns.data(), rank, rows);
}

}  // namespace

void find_lefts(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                double factor) {
  share_out(products_of(matrices, lefts, rights, factor), /*by_rows=*/true, &kernels::find_left);
}

void find_rights(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                 double factor) {
  share_out(products_of(matrices, lefts, rights, factor), /*by_rows=*/false, &kernels::find_right);
}

void set_matrices(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                  double factor) {
  share_out(products_of(matrices, lefts, rights, factor), /*by_rows=*/true, &kernels::set_matrix);
}

void add_to_matrices(const Tensors& matrices, const Tensors& lefts, const Tensors& rights,
                     double factor) {
  share_out(products_of(matrices, lefts, rights, factor), /*by_rows=*/true,
            &kernels::add_to_matrix);
}

void transpose_blocks(const Tensors& sources, const Tensors& targets,
                      const std::vector<int64_t>& rows, const std::vector<int64_t>& columns) {
  if (targets.size() != sources.size() || rows.size() != sources.size() ||
      columns.size() != sources.size()) {
    std::ostringstream text;
    text << sources.size() << " sources have " << targets.size() << " targets, " << rows.size()
         << " numbers of rows and " << columns.size() << " of columns; pass one of each for every "
         << "source";
    throw Error(ErrorKind::kInvalid, text.str());
  }
  std::vector<Portion> portions;
  for (size_t i = 0; i < sources.size(); ++i) {
    const int64_t count = sources[i].numel();
    if (rows[i] < 1 || columns[i] < 1 || count % (rows[i] * columns[i]) != 0) {
      std::ostringstream text;
      text << "sources[" << i << "] has " << count << " elements, which are no blocks of "
           << rows[i] << " x " << columns[i];
      throw Error(ErrorKind::kInvalid, text.str());
    }
    check(sources[i], "sources", i, {count});
    check(targets[i], "targets", i, {count});
    const int64_t size = rows[i] * columns[i];
    const int64_t step = std::max<int64_t>(kCopiedPerPortion / size, 1) * size;
    for (int64_t begin = 0; begin < count; begin += step) {
      const int64_t end = std::min(begin + step, count);
      portions.push_back(
          {i, static_cast<size_t>(begin), static_cast<size_t>(end), kWorkOfCopy * (end - begin)});
    }
  }
  share_out(portions, [&](const Portion& portion) {
    const size_t i = portion.index;
    const auto height = static_cast<size_t>(rows[i]), width = static_cast<size_t>(columns[i]);
    const float* const source = sources[i].const_data_ptr<float>();
    float* const target = targets[i].mutable_data_ptr<float>();
    for (size_t at = portion.begin; at < portion.end; at += height * width) {
      kernels::transpose(target + at, source + at, height, width);
    }
  });
}

void normalize_rows(const Tensors& matrices) {
  std::vector<Portion> portions;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto sizes = sizes_of(matrices[i]);
    check(matrices[i], "matrices", i, sizes);
    const auto rows = static_cast<size_t>(sizes[0]);
    for (size_t row = 0; row < rows; ++row) {
      portions.push_back({i, row, row + 1, kWorkOfCopy * sizes[1] + 1});
    }
  }
  share_out(portions, [&](const Portion& portion) {
    const auto columns = static_cast<size_t>(matrices[portion.index].size(1));
    kernels::normalize(matrices[portion.index].mutable_data_ptr<float>() + portion.begin * columns,
                       columns);
  });
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
               static_cast<size_t>(left.size(0)), static_cast<size_t>(left.size(1)));
  });
  return found;
}

}  // namespace hbm::low_rank
