// Borrowing torch tensors and numpy arrays through DLPack.
#include "bindings/borrow.h"

#include "core/dlpack.h"

namespace skyrl_fast {
namespace {

DType dtype_of(const DLDataType& t) {
  if (t.lanes != 1) return DType::kOther;
  switch (t.code) {
    case kDLBool: return t.bits == 8 ? DType::kBool : DType::kOther;
    case kDLUInt: return t.bits == 8 ? DType::kUInt8 : DType::kOther;
    case kDLBfloat: return t.bits == 16 ? DType::kBFloat16 : DType::kOther;
    case kDLInt:
      switch (t.bits) {
        case 8: return DType::kInt8;
        case 16: return DType::kInt16;
        case 32: return DType::kInt32;
        case 64: return DType::kInt64;
      }
      return DType::kOther;
    case kDLFloat:
      switch (t.bits) {
        case 16: return DType::kFloat16;
        case 32: return DType::kFloat32;
        case 64: return DType::kFloat64;
      }
      return DType::kOther;
  }
  return DType::kOther;
}

void fill(const DLTensor& t, TensorView* view) {
  if (t.ndim > kMaxDims)
    fail(*view, "at most 8 dimensions", std::to_string(t.ndim) + " dimensions");
  view->data = static_cast<char*>(t.data) + t.byte_offset;
  view->dtype = dtype_of(t.dtype);
  view->device = t.device.device_type == kDLCPU || t.device.device_type == kDLCUDAHost
                     ? Device::kCpu
                 : t.device.device_type == kDLCUDA ? Device::kCuda
                                                   : Device::kOther;
  view->device_index = t.device.device_id;
  view->ndim = t.ndim;
  int64_t dense = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    view->shape[d] = t.shape[d];
    view->stride[d] = t.strides ? t.strides[d] : dense;
    dense *= t.shape[d];
  }
}

const DLPackExchangeAPI* read_exchange_table(PyTypeObject* type) {
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  auto* table = static_cast<const DLPackExchangeAPI*>(
      PyCapsule_CheckExact(capsule) ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
                                    : nullptr);
  Py_DECREF(capsule);
  if (table == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const bool is_usable = table->header.version.major == DLPACK_MAJOR_VERSION &&
                         table->dltensor_from_py_object_no_sync != nullptr;
  return is_usable ? table : nullptr;
}

// The exchange table of torch.Tensor and the like, null for a type without one (torch < 2.10). The
// last few types are cached and kept alive, so that no other type can get their address.
const DLPackExchangeAPI* exchange_table(PyTypeObject* type) {
  constexpr int kRemembered = 4;  // Tensor, Parameter, and two more
  struct Entry {
    PyTypeObject* type = nullptr;
    const DLPackExchangeAPI* table = nullptr;
  };
  static Entry entries[kRemembered];
  static int oldest = 0;
  for (const Entry& entry : entries) {
    if (entry.type == type) return entry.table;
  }
  const Entry found{type, read_exchange_table(type)};
  Py_INCREF(type);
  PyTypeObject* forgotten = entries[oldest].type;
  entries[oldest] = found;
  oldest = (oldest + 1) % kRemembered;
  Py_XDECREF(forgotten);
  return found.table;
}

// Whether the memory of a torch tensor holds the negated values (z.conj().imag): DLPack exports it
// as it is.
bool has_negative_bit(py::handle object) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  PyObject* answer = PyObject_CallMethodNoArgs(object.ptr(), name);
  if (answer == nullptr) {
    PyErr_Clear();  // not a torch tensor
    return false;
  }
  const bool is_negative = answer == Py_True;
  Py_DECREF(answer);
  return is_negative;
}

}  // namespace

Borrowed::Borrowed(py::handle object, const char* op, const char* name) {
  view_.op = op;
  view_.name = name;
  if (from_buffer(object)) return;  // numpy; tensors have no buffer
  if (!from_exchange_table(object) && !from_capsule(object)) {
    throw py::type_error(std::string(op) + ": " + name +
                         ": expected a torch tensor or a numpy array, got " +
                         Py_TYPE(object.ptr())->tp_name);
  }
  if (view_.data == nullptr && view_.numel() > 0) {
    fail(view_, "a tensor with storage", "one without, such as a FakeTensor");
  }
  if (has_negative_bit(object)) {
    fail(view_, "a tensor without the negative bit", "one with it; call .resolve_neg()");
  }
}

Borrowed::~Borrowed() {
  if (has_buffer_) PyBuffer_Release(&buffer_);
}

bool Borrowed::from_exchange_table(py::handle object) {
  const DLPackExchangeAPI* table = exchange_table(Py_TYPE(object.ptr()));
  if (table == nullptr) return false;
  DLTensor t;
  if (table->dltensor_from_py_object_no_sync(object.ptr(), &t) != 0) {
    const py::error_already_set error;
    const std::string reason = py::str(error.value());
    PyErr_Format(error.type().ptr(), "%s: %s: expected a tensor that DLPack can share, got: %s",
                 view_.op, view_.name, reason.substr(0, reason.find('\n')).c_str());
    throw py::error_already_set();
  }
  fill(t, &view_);
  return true;
}

bool Borrowed::from_capsule(py::handle object) {
  if (!py::hasattr(object, "__dlpack__")) return false;
  py::object exported = py::hasattr(object, "detach") ? object.attr("detach")()
                                                      : py::reinterpret_borrow<py::object>(object);
  // -1: no wait between streams, which would break the capture of a CUDA graph.
  const bool is_cuda = py::hasattr(exported, "is_cuda") && py::cast<bool>(exported.attr("is_cuda"));
  owner_ =
      is_cuda ? exported.attr("__dlpack__")(py::arg("stream") = -1) : exported.attr("__dlpack__")();
  void* managed = PyCapsule_GetPointer(owner_.ptr(), "dltensor");
  if (managed == nullptr) throw py::error_already_set();
  fill(static_cast<DLManagedTensor*>(managed)->dl_tensor, &view_);
  return true;  // the capsule was not renamed: its destructor frees the managed tensor
}

bool Borrowed::from_buffer(py::handle object) {
  if (!PyObject_CheckBuffer(object.ptr())) return false;
  if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    PyErr_Clear();  // e.g. non-native byte order: DLPack reports the error
    return false;
  }
  has_buffer_ = true;
  if (buffer_.ndim > kMaxDims) fail(view_, "at most 8 dimensions", "more dimensions");
  const char* f = buffer_.format != nullptr ? buffer_.format : "B";
  if (*f == '@' || *f == '=') ++f;
  const int64_t size = buffer_.itemsize;
  if (*f == '?')
    view_.dtype = DType::kBool;
  else if (*f == 'e')
    view_.dtype = DType::kFloat16;
  else if (*f == 'f')
    view_.dtype = DType::kFloat32;
  else if (*f == 'd')
    view_.dtype = DType::kFloat64;
  else if (*f == 'B')
    view_.dtype = DType::kUInt8;
  else if (std::string("bhilqn").find(*f) != std::string::npos)
    view_.dtype = size == 1   ? DType::kInt8
                  : size == 2 ? DType::kInt16
                  : size == 4 ? DType::kInt32
                              : DType::kInt64;
  if (*f != '\0' && f[1] != '\0') view_.dtype = DType::kOther;
  view_.data = buffer_.buf;
  view_.device = Device::kCpu;
  view_.ndim = buffer_.ndim;
  for (int d = 0; d < buffer_.ndim; ++d) {
    view_.shape[d] = buffer_.shape[d];
    if (size == 0 || buffer_.strides[d] % size != 0) {
      fail(view_, "an array whose strides are multiples of its element size",
           "a view into packed records");
    }
    view_.stride[d] = buffer_.strides[d] / size;
  }
  return true;
}

}  // namespace skyrl_fast
