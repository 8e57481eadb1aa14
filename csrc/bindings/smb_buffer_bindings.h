// The memory of Python's arrays and tensors, without a copy and without importing their libraries.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace hbm {

struct PythonMemory {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  // Keeps the memory where it is. Any thread may let go of it, with or without the interpreter's
  // lock: the object is then released by a thread that has the lock, soon.
  std::shared_ptr<const void> hold;
};

// Returns the memory of a C-contiguous object with Python's buffer protocol, or of a contiguous CPU
// tensor. REQUIRES: the interpreter's lock. Throws Error(kInvalid) for any other object, and for
// one that is read-only if it is to be written; pybind11::type_error for one whose elements are
// Python objects, which are addresses of this process.
PythonMemory memory_of(const pybind11::object& object, bool writable);

}  // namespace hbm
