// Checks of arguments that hold one value per cell of padded or ragged rows.
#pragma once

#include <optional>
#include <string>
#include <type_traits>

#include "bindings/borrow.h"
#include "policy_loss/policy_loss.h"

namespace skyrl_fast {

using Optional = std::optional<Borrowed>;

inline void check_like(const TensorView& t, DType dtype, const TensorView& like) {
  check_cpu(t);
  check_dtype(t, dtype);
  check_contiguous(t);
  if (t.shape_string() != like.shape_string()) {
    fail(t, "shape " + like.shape_string(), "shape " + t.shape_string());
  }
}

// Cells of `t`: (N, R) padded, or (A,) with offsets.
inline RowLayout layout_of(const TensorView& t, const Optional& cu) {
  check_cpu(t);
  check_contiguous(t);
  RowLayout rows;
  if (!cu) {
    check_ndim(t, 2);
    rows.num_rows = t.shape[0];
    rows.width = t.shape[1];
    return rows;
  }
  check_ndim(t, 1);
  check_cpu_array(**cu, DType::kInt32, 1);
  const int64_t num_rows = (*cu)->shape[0] - 1;
  const int32_t* p = (*cu)->ptr<int32_t>();
  if (num_rows < 0 || p[0] != 0 || p[num_rows] != t.shape[0]) {
    fail(**cu, "offsets from 0 to " + std::to_string(t.shape[0]),
         num_rows < 0
             ? "no offsets"
             : "offsets from " + std::to_string(p[0]) + " to " + std::to_string(p[num_rows]));
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    if (p[i + 1] < p[i])
      fail(**cu, "non-decreasing offsets", "a step back at row " + std::to_string(i));
  }
  rows.num_rows = num_rows;
  rows.cu = p;
  return rows;
}

inline MaskType mask_type(const TensorView& t) {
  switch (t.dtype) {
    case DType::kBool:
    case DType::kUInt8: return MaskType::kUInt8;
    case DType::kInt64: return MaskType::kInt64;
    case DType::kFloat32: return MaskType::kFloat32;
    default: fail(t, "bool, uint8, int64 or float32", dtype_name(t.dtype));
  }
}

inline LossMask mask_of(const TensorView& t, const TensorView& like) {
  const LossMask mask = {t.data, mask_type(t)};
  check_like(t, t.dtype, like);
  return mask;
}

// An optional argument of dtype `dtype` in the shape of `like`.
template <typename T>
const T* optional_like(py::handle object, const char* op, const char* name, DType dtype,
                       const TensorView& like, Optional* storage) {
  if (object.is_none()) return nullptr;
  storage->emplace(object, op, name);
  const TensorView& view = *storage->value();
  check_like(view, dtype, like);
  return view.ptr<const T>();
}

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, float> ? DType::kFloat32 : DType::kFloat64;

// Calls fn(T{}) with the float type of `t`.
template <typename Fn>
void with_float(const TensorView& t, const Fn& fn) {
  if (t.dtype == DType::kFloat32) return fn(float{});
  if (t.dtype == DType::kFloat64) return fn(double{});
  fail(t, "float32 or float64", dtype_name(t.dtype));
}

}  // namespace skyrl_fast
