#include "layerdrop.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <ranges>
#include <span>
#include <utility>

#include "kernels/copy.h"
#include "kernels/layerdrop_passes.h"
#include "process_group/layerdrop_checks.h"

namespace hbm::layerdrop {
namespace {

// At most kPiece elements of one of several arrays that count as lying one after the other.
struct Piece {
  size_t array;
  int64_t first;  // within the array
  int64_t at;     // within all
  int64_t count;
};

std::vector<Piece> cut(std::span<const int64_t> counts) {
  std::vector<Piece> pieces;
  int64_t at = 0;
  for (size_t array = 0; array < counts.size(); ++array) {
    for (int64_t first = 0; first < counts[array]; first += kPiece) {
      const int64_t count = std::min(kPiece, counts[array] - first);
      pieces.push_back({array, first, at, count});
      at += count;
    }
  }
  return pieces;
}

std::vector<int64_t> counts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

// Each thread has an equal part of the elements, and does the pieces that begin in it.
template <class Work>
void for_each(const std::vector<Piece>& pieces, Work work) {
  if (pieces.empty()) return;
  const int64_t elements = pieces.back().at + pieces.back().count;
  at::parallel_for(0, elements, kPiece, [&](int64_t begin, int64_t end) {
    auto piece = std::ranges::lower_bound(pieces, begin, {}, &Piece::at);
    for (; piece != pieces.end() && piece->at < end; ++piece) work(*piece);
  });
}

std::byte* element(const at::Tensor& tensor, int64_t index) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + index * tensor.element_size();
}

const std::byte* const_element(const at::Tensor& tensor, int64_t index) {
  return static_cast<const std::byte*>(tensor.const_data_ptr()) + index * tensor.element_size();
}

// What a bucket becomes: stretches of zeros (even ones) and parts (odd ones) in turn.
struct Stretches {
  std::vector<int64_t> counts;
  std::vector<int64_t> sources;  // where a part lies in the wire
};

Stretches stretches_of(int64_t total, const std::vector<int64_t>& begins,
                       const std::vector<int64_t>& counts) {
  Stretches all;
  int64_t end = 0, source = 0;
  for (size_t i = 0; i < begins.size(); ++i) {
    all.counts.insert(all.counts.end(), {begins[i] - end, counts[i]});
    all.sources.insert(all.sources.end(), {source, source});
    end = begins[i] + counts[i];
    source += counts[i];
  }
  all.counts.push_back(total - end);
  all.sources.push_back(source);
  return all;
}

// To a place that is not before `from` but overlaps it: from the end, by blocks that are saved
// first.
bool unpack_forwards(std::byte* to, Dtype to_type, const std::byte* from, Dtype from_type,
                     size_t count) {
  constexpr size_t kBlock = 1024;
  std::array<std::byte, kBlock * sizeof(double)> saved;
  const size_t size = element_size(from_type);
  bool finite = true;
  for (size_t end = count; end > 0;) {
    const size_t begin = (end - 1) / kBlock * kBlock;
    std::memcpy(saved.data(), from + begin * size, (end - begin) * size);
    std::byte* const place = to + begin * element_size(to_type);
    finite &= hbm::unpack(place, saved.data(), end - begin, to_type, from_type);
    end = begin;
  }
  return finite;
}

bool unpack_part(std::byte* to, Dtype to_type, const std::byte* from, Dtype from_type,
                 size_t count) {
  const bool in_place = to == from && to_type == from_type;
  const bool overlap = from <= to && to < from + count * element_size(from_type);
  if (overlap && !in_place) return unpack_forwards(to, to_type, from, from_type, count);
  return hbm::unpack(to, from, count, to_type, from_type);
}

}  // namespace

at::Tensor accumulate(const std::vector<at::Tensor>& gradients,
                      const std::vector<std::optional<at::Tensor>>& before,
                      const std::vector<at::Tensor>& after, double factor, bool squares) {
  check_accumulate(gradients, before, after);
  size_t apart = 0;  // bytes that are written where nothing is read
  for (size_t i = 0; i < after.size(); ++i) {
    const bool in_place =
        (before[i] && share_memory(*before[i], after[i])) || share_memory(gradients[i], after[i]);
    if (!in_place) apart += after[i].nbytes();
  }

  const std::vector<Piece> pieces = cut(counts_of(after));
  std::vector<Measure> measures(pieces.size());
  for_each(pieces, [&](const Piece& piece) {
    const size_t i = piece.array;
    const MeasuredSum sum{
        .after = element(after[i], piece.first),
        .before = before[i] ? const_element(*before[i], piece.first) : nullptr,
        .gradient = const_element(gradients[i], piece.first),
        .count = static_cast<size_t>(piece.count),
        .factor = factor,
        .streamed = apart >= kStreamedBytes,
    };
    measures[&piece - pieces.data()] =
        measured_sum(sum, type_of(after[i]), type_of(gradients[i]), squares);
  });

  at::Tensor table = at::zeros({static_cast<int64_t>(after.size()), 2}, at::kDouble);
  double* const rows = table.mutable_data_ptr<double>();
  for (size_t k = 0; k < pieces.size(); ++k) {
    double* const row = rows + 2 * pieces[k].array;
    row[0] += measures[k].moment;
    if (measures[k].any) row[1] = 1;
  }
  return table;
}

void pack(const std::vector<at::Tensor>& caches, const at::Tensor& wire, double factor,
          double inverse) {
  check_pack(caches, wire);
  for_each(cut(counts_of(caches)), [&](const Piece& piece) {
    const at::Tensor& cache = caches[piece.array];
    const Packing packing{
        .wire = element(wire, piece.at),
        .cache = element(cache, piece.first),
        .count = static_cast<size_t>(piece.count),
        .factor = factor,
        .inverse = inverse,
    };
    hbm::pack(packing, type_of(wire), type_of(cache));
  });
}

bool unpack(const at::Tensor& wire, const at::Tensor& buffer, const std::vector<int64_t>& begins,
            const std::vector<int64_t>& counts) {
  check_unpack(wire, buffer, begins, counts);
  const Stretches stretches = stretches_of(buffer.numel(), begins, counts);
  const std::vector<Piece> pieces = cut(stretches.counts);
  std::atomic<bool> finite = true;
  const auto fill = [&](const Piece& piece) {
    std::byte* const to = element(buffer, piece.at);
    const auto count = static_cast<size_t>(piece.count);
    if (piece.array % 2 == 0) {
      std::memset(to, 0, count * buffer.element_size());
      return;
    }
    const std::byte* const from = const_element(wire, stretches.sources[piece.array] + piece.first);
    if (!unpack_part(to, type_of(buffer), from, type_of(wire), count)) {
      finite.store(false, std::memory_order_relaxed);
    }
  };
  if (share_memory(wire, buffer)) {
    std::ranges::for_each(std::views::reverse(pieces),
                          fill);  // no part is written over unread ones
  } else {
    for_each(pieces, fill);
  }
  return finite;
}

double threshold(const std::vector<double>& representatives, const std::vector<int64_t>& sizes,
                 double ratio) {
  check_threshold(representatives, sizes, ratio);
  constexpr double infinity = std::numeric_limits<double>::infinity();
  std::vector<std::pair<double, int64_t>> layers;
  for (size_t i = 0; i < sizes.size(); ++i) {
    layers.emplace_back(std::isnan(representatives[i]) ? infinity : representatives[i], sizes[i]);
  }
  std::ranges::sort(layers);
  const double total = std::accumulate(sizes.begin(), sizes.end(), 0.0);
  double taken = 0;
  for (const auto& [representative, size] : layers) {
    taken += static_cast<double>(size);
    if (taken > ratio * total) return representative;
  }
  return -1;
}

}  // namespace hbm::layerdrop
