// Checks of arguments in the memory of a CUDA device. Nothing here reads that memory.
#pragma once

#include <optional>
#include <string>

#include "bindings/borrow.h"
#include "core/cuda.h"

namespace skyrl_fast {

#if defined(SKYRL_FAST_EMULATE_CUDA)
constexpr Device kCudaDevice = Device::kCpu;  // emulated kernels take the CPU's arrays
#else
constexpr Device kCudaDevice = Device::kCuda;
#endif

inline void check_cuda(const TensorView& t) {
  if (t.device != kCudaDevice) fail(t, "a tensor on a CUDA device", "a tensor on another device");
}

inline void check_same_device(const TensorView& t, const TensorView& like) {
  if (t.device != like.device || t.device_index != like.device_index) {
    fail(t, std::string("a tensor on the device of ") + like.name, "a tensor on another device");
  }
}

inline cudaStream_t stream_of(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

// A dense 1-D array on the device of `like`.
template <typename T>
T* cuda_array(const TensorView& t, DType dtype, int64_t size, const TensorView& like) {
  check_same_device(t, like);
  check_dtype(t, dtype);
  check_ndim(t, 1);
  check_contiguous(t);
  check_size(t, 0, size);
  return t.ptr<T>();
}

// An argument that may be None.
class SKYRL_HIDDEN MaybeOnCuda {
 public:
  MaybeOnCuda(py::handle object, const char* op, const char* name) {
    if (!object.is_none()) borrowed_.emplace(object, op, name);
  }
  template <typename T>
  T* array(DType dtype, int64_t size, const TensorView& like) const {
    return borrowed_ ? cuda_array<T>(**borrowed_, dtype, size, like) : nullptr;
  }
  explicit operator bool() const { return borrowed_.has_value(); }

 private:
  std::optional<Borrowed> borrowed_;
};

}  // namespace skyrl_fast
