#include "kernels/thin_products.h"

#include <vector>

#include "kernels/kernels.h"
#include "kernels/tuning.h"

namespace hbm {

void find_left(const ThinProduct& product, size_t begin, size_t end) {
  chosen_kernels().thin.find_left(product, begin, end);
}

void find_right(const ThinProduct& product, size_t begin, size_t end) {
  chosen_kernels().thin.find_right(product, begin, end);
}

void set_matrix(const ThinProduct& product, size_t begin, size_t end) {
  chosen_kernels().thin.set_matrix(product, begin, end);
}

void add_to_matrix(const ThinProduct& product, size_t begin, size_t end) {
  chosen_kernels().thin.add_to_matrix(product, begin, end);
}

void transpose(float* to, const float* from, size_t rows, size_t columns) {
  chosen_kernels().thin.transpose(to, from, rows, columns);
}

void normalize(float* vector, size_t count) { chosen_kernels().thin.normalize(vector, count); }

void orthonormalize(const Kernels& kernels, float* columns, size_t rows, size_t rank) {
  std::vector<float> taus(rank), scratch(2 * kReflectionsPerStep * rank);
  kernels.thin.orthonormalize(columns, rows, rank, taus.data(), scratch.data());
}

void orthonormalize(float* columns, size_t rows, size_t rank) {
  orthonormalize(chosen_kernels(), columns, rows, rank);
}

}  // namespace hbm
