// Data of messages, which sender and receiver make alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace hbm {

using Bytes = std::vector<unsigned char>;

inline Bytes pattern(uint64_t seed, size_t bytes) {
  Bytes data(bytes);
  std::mt19937_64 random(seed);
  for (size_t at = 0; at < bytes; at += 8) {
    const uint64_t word = random();
    std::memcpy(data.data() + at, &word, std::min<size_t>(8, bytes - at));
  }
  return data;
}

}  // namespace hbm
