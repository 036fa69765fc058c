// Borrowed views of arrays, and the checks every op makes on them. No Python, no torch.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#if defined(__CUDACC__)
#define SKYRL_HD __host__ __device__ __forceinline__
#else
#define SKYRL_HD inline
#endif

namespace skyrl_fast {

enum class DType : uint8_t {
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kOther,
};

enum class Device : uint8_t { kCpu, kCuda, kOther };

inline const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBool: return "bool";
    case DType::kUInt8: return "uint8";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat32: return "float32";
    case DType::kFloat64: return "float64";
    case DType::kOther: break;
  }
  return "an unsupported dtype";
}

constexpr int kMaxDims = 8;

// A view that is valid only during the call that borrowed it. Strides count elements.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kOther;
  Device device = Device::kOther;
  int device_index = 0;
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};
  const char* op = "";
  const char* name = "";

  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= shape[d];
    return n;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      if (shape[d] != 1 && stride[d] != expected) return numel() == 0;
      expected *= shape[d];
    }
    return true;
  }
  template <typename T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
  std::string shape_string() const {
    std::ostringstream s;
    s << "(";
    for (int d = 0; d < ndim; ++d) s << (d ? ", " : "") << shape[d];
    s << (ndim == 1 ? ",)" : ")");
    return s.str();
  }
};

// Every message names the op, the argument, the wanted and the actual value.
[[noreturn]] inline void fail(const TensorView& t, const std::string& wanted,
                              const std::string& got) {
  throw std::invalid_argument(std::string(t.op) + ": " + t.name + ": expected " + wanted +
                              ", got " + got);
}

inline void check_dtype(const TensorView& t, DType want) {
  if (t.dtype != want) fail(t, dtype_name(want), dtype_name(t.dtype));
}

inline void check_ndim(const TensorView& t, int want) {
  if (t.ndim != want) fail(t, std::to_string(want) + "-dimensional", "shape " + t.shape_string());
}

inline void check_size(const TensorView& t, int dim, int64_t want) {
  if (t.shape[dim] != want) {
    fail(t, "size " + std::to_string(want) + " in dimension " + std::to_string(dim),
         "shape " + t.shape_string());
  }
}

inline void check_contiguous(const TensorView& t) {
  if (!t.is_contiguous())
    fail(t, "contiguous memory", "strided memory of shape " + t.shape_string());
}

inline void check_cpu(const TensorView& t) {
  if (t.device != Device::kCpu) fail(t, "a tensor on the CPU", "a tensor on another device");
}

// The common case: a dense CPU array of one dtype and rank.
inline void check_cpu_array(const TensorView& t, DType dtype, int ndim) {
  check_cpu(t);
  check_dtype(t, dtype);
  check_ndim(t, ndim);
  check_contiguous(t);
}

}  // namespace skyrl_fast
