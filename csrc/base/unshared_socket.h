// A socket that a forked child closes. Move-only.
//
// Threads: one thread at a time may use an object.
#pragma once

#include <utility>

#include "base/close_in_children.h"
#include "base/descriptor.h"

namespace hbm {

class UnsharedSocket {
 public:
  UnsharedSocket() = default;
  explicit UnsharedSocket(Descriptor descriptor) : descriptor_(std::move(descriptor)) {
    if (descriptor_) close_in_children(descriptor_.get());
  }
  UnsharedSocket(UnsharedSocket&&) noexcept = default;
  UnsharedSocket& operator=(UnsharedSocket&& other) noexcept {
    reset();
    descriptor_ = std::move(other.descriptor_);
    return *this;
  }
  ~UnsharedSocket() { reset(); }

  explicit operator bool() const noexcept { return static_cast<bool>(descriptor_); }
  int get() const noexcept { return descriptor_.get(); }
  void reset() noexcept {
    if (descriptor_) keep_in_children(descriptor_.get());
    descriptor_ = Descriptor();
  }
  // Forgets the socket without closing it. For a forked child, which has closed it already and may
  // use its number for another file.
  void forget() noexcept { static_cast<void>(descriptor_.release()); }
  // Passes ownership to the caller. A forked child keeps the descriptor from then on.
  Descriptor release() {
    keep_in_children(descriptor_.get());
    return Descriptor(descriptor_.release());
  }

 private:
  Descriptor descriptor_;
};

}  // namespace hbm
