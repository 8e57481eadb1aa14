#include "bindings/smb_buffer_bindings.h"

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace py = pybind11;

namespace hbm::bindings {
namespace {

// A Python object, or a view of its memory, that must be released.
struct HeldBuffer {
  PyObject* object = nullptr;
  Py_buffer view{};

  void release() {
    if (view.obj != nullptr) PyBuffer_Release(&view);
    Py_CLEAR(object);
  }
};

// Keeps unused buffers until a thread that holds the interpreter's lock releases them.
class ReleaseQueue {
 public:
  void add(HeldBuffer* held) {
    bool first = false;
    {
      const std::scoped_lock lock(mutex_);
      first = held_.empty();
      held_.push_back(held);
    }
    // If Python's queue of pending calls is full, the next memory_of() releases the buffers.
    if (first && Py_IsInitialized() != 0) Py_AddPendingCall(&release_all, nullptr);
  }

  // REQUIRES: the interpreter's lock.
  void release() {
    std::vector<HeldBuffer*> gone;
    {
      const std::scoped_lock lock(mutex_);
      gone.swap(held_);
    }
    for (HeldBuffer* held : gone) {
      held->release();
      delete held;
    }
  }

  static ReleaseQueue& instance() {
    static ReleaseQueue& one = *new ReleaseQueue;  // threads may outlive static objects
    return one;
  }

 private:
  static int release_all(void*) {
    instance().release();
    return 0;
  }

  std::mutex mutex_;
  std::vector<HeldBuffer*> held_;
};

std::shared_ptr<const void> hold(const HeldBuffer& held) {
  return {new HeldBuffer(held), [](const HeldBuffer* last) {
            ReleaseQueue::instance().add(const_cast<HeldBuffer*>(last));
          }};
}

std::string type_name(const py::object& object) {
  return py::str(py::type::of(object).attr("__name__"));
}

PythonMemory tensor_memory(const py::object& tensor) {
  const std::string device = py::str(tensor.attr("device").attr("type"));
  if (device != "cpu") {
    throw Error(ErrorKind::kInvalid, "a box moves CPU tensors, and this one is on " + device);
  }
  if (!tensor.attr("is_contiguous")().cast<bool>()) {
    throw Error(ErrorKind::kInvalid, "the tensor is not contiguous: pass tensor.contiguous()");
  }
  if (tensor.attr("is_conj")().cast<bool>() || tensor.attr("is_neg")().cast<bool>()) {
    throw Error(ErrorKind::kInvalid,
                "the tensor is a lazy conjugate or negative: pass tensor.resolve_conj() or "
                "tensor.resolve_neg()");
  }
  PythonMemory memory;
  memory.data = reinterpret_cast<std::byte*>(tensor.attr("data_ptr")().cast<uintptr_t>());
  memory.bytes =
      tensor.attr("numel")().cast<uint64_t>() * tensor.attr("element_size")().cast<uint64_t>();
  memory.hold = hold({.object = py::object(tensor).release().ptr(), .view = {}});
  return memory;
}

bool get_view(const py::object& object, bool writable, Py_buffer& view) {
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  return PyObject_GetBuffer(object.ptr(), &view, flags) == 0;
}

// Returns true if a buffer's format has an element of type O. An O between colons is part of a
// field's name, and does not count.
bool has_objects(const char* format) {
  bool in_name = false;
  for (; format != nullptr && *format != 0; ++format) {
    if (*format == ':') in_name = !in_name;
    if (*format == 'O' && !in_name) return true;
  }
  return false;
}

PythonMemory buffer_memory(const py::object& object, bool writable) {
  HeldBuffer held;
  if (!get_view(object, writable, held.view)) {
    const py::error_already_set error;
    // An array of an extension type, such as bfloat16, has no buffer. A view of its bytes has one.
    const bool array = py::hasattr(object, "__array_interface__") &&
                       object.attr("flags").attr("c_contiguous").cast<bool>();
    if (!array || !get_view(object.attr("view")("uint8"), writable, held.view)) {
      PyErr_Clear();
      throw Error(ErrorKind::kInvalid,
                  "the memory of this " + type_name(object) + " cannot be used: " + error.what() +
                      "; it must be C-contiguous" + (writable ? " and writable" : ""));
    }
  }
  if (has_objects(held.view.format)) {
    held.release();
    throw py::type_error("this " + type_name(object) +
                         " is of Python objects, whose addresses mean nothing in a box: convert it "
                         "to numbers, as by numpy.asarray(..., dtype=\"float64\")");
  }
  return {static_cast<std::byte*>(held.view.buf), static_cast<uint64_t>(held.view.len), hold(held)};
}

}  // namespace

PythonMemory memory_of(const py::object& object, bool writable) {
  ReleaseQueue::instance().release();
  if (py::hasattr(object, "data_ptr") && py::hasattr(object, "element_size")) {
    return tensor_memory(object);
  }
  if (PyObject_CheckBuffer(object.ptr()) != 0) return buffer_memory(object, writable);
  throw Error(ErrorKind::kInvalid,
              type_name(object) +
                  " has no memory to use: pass a NumPy array, a CPU tensor, or an object with "
                  "Python's buffer protocol");
}

}  // namespace hbm::bindings
