// A file descriptor that is closed with its owner. Move-only.
//
// Threads: one thread at a time may use an object.
#pragma once

#include <unistd.h>

#include <utility>

namespace hbm {

class Descriptor {
 public:
  Descriptor() noexcept = default;
  // Takes ownership of `descriptor`. A negative number means that there is no descriptor.
  explicit Descriptor(int descriptor) noexcept : descriptor_(descriptor) {}
  Descriptor(Descriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Descriptor() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  explicit operator bool() const noexcept { return descriptor_ >= 0; }
  int get() const noexcept { return descriptor_; }

  // Passes ownership of the open descriptor to the caller.
  int release() noexcept { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_ = -1;
};

}  // namespace hbm
