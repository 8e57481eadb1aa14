#include "base/overlap.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"

namespace hbm {
namespace {

struct Dimension {
  uint64_t size;    // at least 2
  uint64_t stride;  // at least 1
  uint64_t reach() const { return (size - 1) * stride; }
};
using Dimensions = std::vector<Dimension>;

// A bitmap of addresses. Fresh pages of calloc() take no memory until they are written.
class AddressSet {
 public:
  explicit AddressSet(uint64_t count)
      : words_(static_cast<uint64_t*>(std::calloc(count / 64 + 1, sizeof(uint64_t))), &std::free) {
    if (words_) return;
    throw Error(ErrorKind::kExhausted, "cannot allocate " + std::to_string(count / 8) +
                                           " bytes to find out whether elements of a strided "
                                           "tensor share memory; clone() it");
  }

  // Inserts an address. Returns false if the set has it already.
  bool insert(uint64_t address) {
    uint64_t& word = words_.get()[address / 64];
    const uint64_t bit = uint64_t{1} << address % 64;
    if ((word & bit) != 0) return false;
    word |= bit;
    return true;
  }

 private:
  std::unique_ptr<uint64_t, decltype(&std::free)> words_;
};

uint64_t reach_of(const Dimensions& dimensions) {
  uint64_t reach = 0;
  for (const Dimension& dimension : dimensions) reach += dimension.reach();
  return reach;
}

// Inserts the address of each element; `address` is the address of the first element. Returns false
// at the first address that is in the set already.
bool insert_all(AddressSet& addresses, const Dimensions& dimensions, uint64_t address) {
  std::vector<uint64_t> index(dimensions.size());
  for (;;) {
    if (!addresses.insert(address)) return false;
    size_t d = 0;
    while (d < dimensions.size() && ++index[d] == dimensions[d].size) {
      address -= dimensions[d].reach();
      index[d++] = 0;
    }
    if (d == dimensions.size()) return true;
    address += dimensions[d].stride;
  }
}

bool overlap(Dimensions dimensions) {
  // Remove the dimensions that cannot cause an overlap. The stride of such a dimension is larger
  // than the reach of all dimensions with smaller strides.
  std::ranges::sort(dimensions, {}, &Dimension::stride);
  uint64_t reach = reach_of(dimensions);
  while (!dimensions.empty()) {
    const uint64_t rest = reach - dimensions.back().reach();
    if (dimensions.back().stride <= rest) break;
    reach = rest;
    dimensions.pop_back();
  }
  if (dimensions.empty()) return false;

  uint64_t unit = 0;
  uint64_t elements = 1;
  for (const Dimension& dimension : dimensions) {
    unit = std::gcd(unit, dimension.stride);
    elements *= dimension.size;
  }
  for (Dimension& dimension : dimensions) dimension.stride /= unit;
  const uint64_t count = reach / unit + 1;
  if (elements > count) return true;  // more elements than addresses
  AddressSet addresses(count);
  return !insert_all(addresses, dimensions, 0);
}

// Returns the dimensions of an array, with strides in units of `unit` bytes. If an element has
// several units, these units are one more dimension.
Dimensions units_of(const StridedArray& array, uint64_t unit) {
  Dimensions dimensions;
  const uint64_t element = array.element / unit;
  if (element > 1) dimensions.push_back({element, 1});
  for (size_t d = 0; d < array.sizes.size(); ++d) {
    if (array.sizes[d] == 1) continue;
    dimensions.push_back(
        {static_cast<uint64_t>(array.sizes[d]), static_cast<uint64_t>(array.strides[d]) * element});
  }
  return dimensions;
}

bool empty(std::span<const int64_t> sizes) { return std::ranges::count(sizes, 0) > 0; }

}  // namespace

bool elements_overlap(std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  if (empty(sizes)) return false;
  Dimensions dimensions;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    if (strides[d] == 0) return true;
    dimensions.push_back({static_cast<uint64_t>(sizes[d]), static_cast<uint64_t>(strides[d])});
  }
  return overlap(std::move(dimensions));
}

bool arrays_overlap(const StridedArray& a, const StridedArray& b) {
  if (a.begin > b.begin) return arrays_overlap(b, a);
  if (empty(a.sizes) || empty(b.sizes)) return false;
  const uint64_t unit = std::gcd(b.begin - a.begin, std::gcd(a.element, b.element));
  const uint64_t distance = (b.begin - a.begin) / unit;
  Dimensions ours = units_of(a, unit), theirs = units_of(b, unit);
  if (distance > reach_of(ours)) return false;
  if (distance == 0) return true;
  if (a.element == b.element && std::ranges::equal(a.sizes, b.sizes) &&
      std::ranges::equal(a.strides, b.strides)) {
    ours.push_back({2, distance});
    return overlap(std::move(ours));
  }
  AddressSet addresses(std::max(reach_of(ours), distance + reach_of(theirs)) + 1);
  insert_all(addresses, ours, 0);
  return !insert_all(addresses, theirs, distance);
}

}  // namespace hbm
