// Zeroed memory of a fixed size: this process' own, or a file mapped for reading and writing, whose
// contents survive the process.
//
// Threads: what one thread makes, any may use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace hbm::box {

class MappedRegion {
 public:
  MappedRegion() noexcept = default;  // none

  // Throws Error(kExhausted) when memory is short.
  static MappedRegion in_memory(uint64_t bytes);

  // A new file; one that was there is replaced. Throws Error(kExhausted) when the disk is full,
  // Error(kUnavailable) when the kernel refuses for another reason.
  static MappedRegion create(const std::string& path, uint64_t bytes);

  // All of a file that is there. Throws Error(kUnavailable).
  static MappedRegion open(const std::string& path);

  MappedRegion(MappedRegion&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedRegion& operator=(MappedRegion&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~MappedRegion();

  explicit operator bool() const noexcept { return base_ != nullptr; }
  std::byte* base() const noexcept { return base_; }
  uint64_t size() const noexcept { return size_; }

 private:
  MappedRegion(std::byte* base, uint64_t size) noexcept : base_(base), size_(size) {}

  std::byte* base_ = nullptr;
  uint64_t size_ = 0;
};

// Returns when the disk has those bytes of a mapped file. Throws Error(kUnavailable) when it fails.
void persist(const void* at, uint64_t bytes);

}  // namespace hbm::box
