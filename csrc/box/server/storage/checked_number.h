// Checksums of the records that a box changes while it uses the store (operation_record.h). They
// detect accidental damage, not deliberate changes.
//
// Threads: any; each member of CheckedNumber is one atomic access.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace hbm::box::server::storage {

// Mixes a word into a hash: the finaliser of SplitMix64. It is a bijection, so different words
// after the same prefix give different hashes.
constexpr uint64_t mix(uint64_t hash, uint64_t word) noexcept {
  uint64_t mixed = (hash ^ word) + 0x9E3779B97F4A7C15u;
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
  return mixed ^ mixed >> 31;
}

// Returns the checksum of all bytes of a value, padding included. Pass the stored value: a copy may
// have other padding.
template <class T>
uint64_t checksum(uint64_t seed, const T& value) noexcept {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
  for (size_t at = 0; at < sizeof(T); at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, reinterpret_cast<const std::byte*>(&value) + at, sizeof word);
    seed = mix(seed, word);
  }
  return seed;
}

// A number below 2^48, stored with a checksum of 16 bits by one atomic access. Zero-filled memory
// is the number 0 with the right checksum.
class CheckedNumber {
 public:
  uint64_t load(std::memory_order order) const noexcept { return bits_.load(order) & kNumber; }
  void store(uint64_t number, std::memory_order order) noexcept {
    bits_.store(with_checksum(number), order);
  }
  uint64_t exchange(uint64_t number, std::memory_order order) noexcept {
    return bits_.exchange(with_checksum(number), order) & kNumber;
  }
  // Sequentially consistent, as with std::atomic.
  uint64_t load() const noexcept { return load(std::memory_order_seq_cst); }
  operator uint64_t() const noexcept { return load(); }
  CheckedNumber& operator=(uint64_t number) noexcept {
    store(number, std::memory_order_seq_cst);
    return *this;
  }

  // Returns false if the checksum is wrong.
  bool sound() const noexcept {
    const uint64_t bits = bits_.load(std::memory_order_acquire);
    return bits == with_checksum(bits & kNumber);
  }

 private:
  static constexpr uint64_t kNumber = (uint64_t{1} << 48) - 1;

  static constexpr uint64_t with_checksum(uint64_t number) noexcept {
    return (number & kNumber) | (mix(0, number & kNumber) ^ mix(0, 0)) << 48;
  }

  std::atomic<uint64_t> bits_{0};
};

}  // namespace hbm::box::server::storage
