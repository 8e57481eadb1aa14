#include "layerdrop.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>

#include "base/error.h"

namespace hbm::layerdrop {
namespace {

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream text;
  (text << ... << parts);
  throw Error(ErrorKind::kInvalid, text.str());
}

}  // namespace

double threshold(const std::vector<double>& scores, const std::vector<int64_t>& sizes,
                 double ratio) {
  require(scores.size() == sizes.size(), "scores has ", scores.size(), " items and sizes has ",
          sizes.size(), "; they must have as many");
  require(ratio >= 0 && ratio < 1, "ratio is ", ratio, "; it must be at least 0 and less than 1");
  constexpr double infinity = std::numeric_limits<double>::infinity();
  std::vector<std::pair<double, int64_t>> layers;
  for (size_t i = 0; i < sizes.size(); ++i) {
    require(sizes[i] >= 0, "sizes[", i, "] is ", sizes[i], "; a layer has at least 0 elements");
    layers.emplace_back(std::isnan(scores[i]) ? infinity : scores[i], sizes[i]);
  }
  std::ranges::sort(layers);
  const double total = std::accumulate(sizes.begin(), sizes.end(), 0.0);
  double taken = 0;
  for (const auto& [score, size] : layers) {
    taken += static_cast<double>(size);
    if (taken > ratio * total) return score;
  }
  return -1;
}

}  // namespace hbm::layerdrop
