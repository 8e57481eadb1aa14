// Compares products that have tall and skinny factors with sums in float64, on every instruction
// set that this processor runs. Also checks that columns become orthonormal.
#include "kernels/tall_skinny_products.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/tuning.h"
#include "seeds.h"

namespace hbm::kernels {

void PrintTo(const Kernels* kernels, std::ostream* out) { *out << kernels->name; }

namespace {

using Floats = std::vector<float>;

struct Shape {
  size_t rows;
  size_t columns;
  size_t rank;
};

constexpr std::array<Shape, 12> kShapes = {{{1, 1, 1},
                                            {7, 5, 3},
                                            {64, 147, 18},
                                            {65, 64, 1},
                                            {129, 33, 7},
                                            {24, 256, 24},
                                            {200, 1030, 13},
                                            {50, 2051, 4},
                                            {300, 70, 40},
                                            {5, 0, 2},
                                            {0, 5, 2},
                                            {6, 9, 0}}};

class TallSkinnyProductsTest : public testing::TestWithParam<const Kernels*> {
 protected:
  Floats numbers(size_t count) {
    Floats made(count);
    for (float& value : made) value = static_cast<float>(normal_(random_));
    return made;
  }

  const TallSkinnyProducts& tall_skinny() const { return GetParam()->tall_skinny; }

  // Computes a part of a product by several calls. Each call begins at a multiple of `step`. The
  // result must have the bits of a single call's result.
  void in_pieces(TallSkinnyProducts::Part part, const TallSkinnyProduct& product, size_t all,
                 size_t step) {
    for (size_t begin = 0; begin < all;) {
      const size_t end = std::min(all, begin + step * (1 + random_() % 3));
      part(product, begin, end);
      begin = end;
    }
  }

  std::mt19937_64 random_ = test_random();
  std::normal_distribution<double> normal_;
};

// Expects `found` to be start + term(0) + ... + term(terms - 1), up to rounding.
template <class Term>
void expect_sum(float found, double start, size_t terms, const Term& term) {
  double sum = start, size = std::abs(start);
  for (size_t i = 0; i < terms; ++i) {
    sum += term(i);
    size += std::abs(term(i));
  }
  const double bound = size * static_cast<double>(terms + 2) * 6e-8;
  ASSERT_LE(std::abs(found - sum), bound) << "of sizes " << size;
}

struct Problem {
  Shape shape;
  Floats matrix, left, right;
  float factor = 0.75F;

  TallSkinnyProduct product() {
    return {matrix.data(), left.data(), right.data(), shape.rows,
            shape.columns, shape.rank,  factor};
  }
  double at(size_t row, size_t column) const { return matrix[row * shape.columns + column]; }
  double l(size_t row, size_t k) const { return left[row * shape.rank + k]; }
  double r(size_t k, size_t column) const { return right[k * shape.columns + column]; }
};

TEST_P(TallSkinnyProductsTest, FindsTheLeftFactor) {
  for (const Shape& shape : kShapes) {
    Problem problem{shape, numbers(shape.rows * shape.columns),
                    Floats(shape.rows * shape.rank, NAN), numbers(shape.rank * shape.columns)};
    tall_skinny().find_left(problem.product(), 0, shape.rows);
    const Floats whole = problem.left;
    std::ranges::fill(problem.left, NAN);
    in_pieces(tall_skinny().find_left, problem.product(), shape.rows, kTallSkinnyPartRows);
    ASSERT_EQ(problem.left, whole);
    for (size_t row = 0; row < shape.rows; ++row) {
      for (size_t k = 0; k < shape.rank; ++k) {
        expect_sum(whole[row * shape.rank + k], 0, shape.columns, [&](size_t column) {
          return problem.factor * problem.at(row, column) * problem.r(k, column);
        });
      }
    }
  }
}

TEST_P(TallSkinnyProductsTest, FindsTheRightFactor) {
  for (const Shape& shape : kShapes) {
    Problem problem{shape, numbers(shape.rows * shape.columns), numbers(shape.rows * shape.rank),
                    Floats(shape.rank * shape.columns, NAN)};
    tall_skinny().find_right(problem.product(), 0, shape.columns);
    const Floats whole = problem.right;
    std::ranges::fill(problem.right, NAN);
    in_pieces(tall_skinny().find_right, problem.product(), shape.columns, kTallSkinnyPartColumns);
    ASSERT_EQ(problem.right, whole);
    for (size_t k = 0; k < shape.rank; ++k) {
      for (size_t column = 0; column < shape.columns; ++column) {
        expect_sum(whole[k * shape.columns + column], 0, shape.rows, [&](size_t row) {
          return problem.factor * problem.at(row, column) * problem.l(row, k);
        });
      }
    }
  }
}

TEST_P(TallSkinnyProductsTest, SetsAndAddsToTheMatrix) {
  for (const Shape& shape : kShapes) {
    for (const bool adds : {false, true}) {
      const auto part = adds ? tall_skinny().add_to_matrix : tall_skinny().set_matrix;
      const Floats before =
          adds ? numbers(shape.rows * shape.columns) : Floats(shape.rows * shape.columns, NAN);
      Problem problem{shape, before, numbers(shape.rows * shape.rank),
                      numbers(shape.rank * shape.columns)};
      part(problem.product(), 0, shape.rows);
      const Floats whole = problem.matrix;
      problem.matrix = before;
      in_pieces(part, problem.product(), shape.rows, kTallSkinnyPartRows);
      ASSERT_EQ(problem.matrix, whole);
      for (size_t row = 0; row < shape.rows; ++row) {
        for (size_t column = 0; column < shape.columns; ++column) {
          const size_t at = row * shape.columns + column;
          expect_sum(whole[at], adds ? before[at] : 0, shape.rank, [&](size_t k) {
            return problem.factor * problem.l(row, k) * problem.r(k, column);
          });
        }
      }
    }
  }
}

TEST_P(TallSkinnyProductsTest, Transposes) {
  for (const auto& [rows, columns, rank] : kShapes) {
    const Floats given = numbers(rows * columns);
    Floats found(rows * columns, NAN);
    tall_skinny().transpose(found.data(), given.data(), rows, columns);
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i], given[i % rows * columns + i / rows]) << rows << " x " << columns;
    }
  }
}

TEST_P(TallSkinnyProductsTest, DividesAVectorByItsNorm) {
  for (const size_t count : {1, 5, 16, 77, 1030}) {
    const Floats given = numbers(count);
    Floats found = given;
    tall_skinny().normalize(found.data(), count);
    double squares = 0;
    for (const double value : given) squares += value * value;
    for (size_t i = 0; i < count; ++i) {
      ASSERT_NEAR(found[i], given[i] / std::sqrt(squares), 1e-6) << count;
    }
  }
  Floats zeros(20);
  tall_skinny().normalize(zeros.data(), zeros.size());
  EXPECT_EQ(zeros, Floats(20));
}

// Expects that the columns of `basis` are orthonormal, and that each column of `given` is a linear
// combination of them.
void expect_basis(const Floats& basis, const Floats& given, size_t rows, size_t rank) {
  const auto dot = [rows](const float* a, const float* b) {
    double sum = 0;
    for (size_t i = 0; i < rows; ++i) sum += static_cast<double>(a[i]) * b[i];
    return sum;
  };
  std::vector<double> parts(rank);
  for (size_t k = 0; k < rank; ++k) {
    const float* const column = given.data() + k * rows;
    for (size_t j = 0; j < rank; ++j) {
      const float* const other = basis.data() + j * rows;
      ASSERT_NEAR(dot(basis.data() + k * rows, other), j == k ? 1 : 0, 4e-6) << k << " and " << j;
      parts[j] = dot(column, other);
    }
    const double norm = std::sqrt(dot(column, column));
    for (size_t i = 0; i < rows; ++i) {
      double sum = 0;
      for (size_t j = 0; j < rank; ++j) sum += parts[j] * basis[j * rows + i];
      ASSERT_NEAR(sum, column[i], 1e-5 * norm) << "column " << k << ", row " << i;
    }
  }
}

TEST_P(TallSkinnyProductsTest, MakesColumnsOrthonormal) {
  for (const auto& [rows, columns, rank] : kShapes) {
    if (rank > rows) continue;
    Floats given = numbers(rows * rank);
    for (size_t k = 0; k < rank; ++k) {  // some columns are zero, sums of others, or small
      float* const column = given.data() + k * rows;
      if (k % 7 == 2) std::fill(column, column + rows, 0.0F);
      if (k % 7 == 4) {
        for (size_t i = 0; i < rows; ++i) column[i] = column[i - rows] - 2 * given[i];
      }
      if (k % 7 == 5) {
        for (size_t i = 0; i < rows; ++i) column[i] *= 1e-12F;
      }
      if (k % 7 == 6) {  // the squares are denormal, or 0
        for (size_t i = 0; i < rows; ++i) column[i] *= k < 14 ? 1e-21F : 1e-33F;
      }
    }
    Floats basis = given;
    orthonormalize(*GetParam(), basis.data(), rows, rank);
    expect_basis(basis, given, rows, rank);
  }
}

TEST_P(TallSkinnyProductsTest, PropagatesNonFiniteElements) {
  Problem problem{{40, 50, 3}, numbers(2000), Floats(120), numbers(150)};
  problem.matrix[7 * 50 + 9] = std::numeric_limits<float>::infinity();
  tall_skinny().find_left(problem.product(), 0, 40);
  for (size_t i = 0; i < 120; ++i) EXPECT_EQ(std::isfinite(problem.left[i]), i / 3 != 7) << i;
}

INSTANTIATE_TEST_SUITE_P(Isa, TallSkinnyProductsTest, testing::ValuesIn(runnable_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace hbm::kernels
