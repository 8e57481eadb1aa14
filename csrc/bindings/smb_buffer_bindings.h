// Finds the memory of Python's arrays and tensors. Does not copy it, and does not import the
// libraries that define these objects.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace hbm::bindings {

struct PythonMemory {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  // Keeps the memory valid. Any thread may drop `hold`, with or without the interpreter's lock. A
  // thread with the lock releases the object soon after.
  std::shared_ptr<const void> hold;
};

// Returns the memory of a C-contiguous object with Python's buffer protocol, or of a contiguous CPU
// tensor. REQUIRES: the interpreter's lock is held. Throws Error(kInvalid) for any other object,
// and for a read-only one if `writable`. Throws pybind11::type_error if the elements are Python
// objects, because these are addresses, which mean nothing in a box.
PythonMemory memory_of(const pybind11::object& object, bool writable);

}  // namespace hbm::bindings
