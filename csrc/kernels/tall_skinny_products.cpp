#include "kernels/tall_skinny_products.h"

#include <vector>

#include "kernels/kernels.h"
#include "kernels/tuning.h"

namespace hbm::kernels {

void find_left(const TallSkinnyProduct& product, size_t begin, size_t end) {
  chosen_kernels().tall_skinny.find_left(product, begin, end);
}

void find_right(const TallSkinnyProduct& product, size_t begin, size_t end) {
  chosen_kernels().tall_skinny.find_right(product, begin, end);
}

void set_matrix(const TallSkinnyProduct& product, size_t begin, size_t end) {
  chosen_kernels().tall_skinny.set_matrix(product, begin, end);
}

void add_to_matrix(const TallSkinnyProduct& product, size_t begin, size_t end) {
  chosen_kernels().tall_skinny.add_to_matrix(product, begin, end);
}

void transpose(float* to, const float* from, size_t rows, size_t columns) {
  chosen_kernels().tall_skinny.transpose(to, from, rows, columns);
}

void normalize(float* vector, size_t count) {
  chosen_kernels().tall_skinny.normalize(vector, count);
}

void orthonormalize(const Kernels& kernels, float* columns, size_t rows, size_t rank) {
  std::vector<float> taus(rank), scratch(2 * kReflectionsPerStep * rank);
  kernels.tall_skinny.orthonormalize(columns, rows, rank, taus.data(), scratch.data());
}

void orthonormalize(float* columns, size_t rows, size_t rank) {
  orthonormalize(chosen_kernels(), columns, rows, rank);
}

}  // namespace hbm::kernels
