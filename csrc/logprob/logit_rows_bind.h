// A tensor argument as rows of logits.
#pragma once

#include <string>

#include "bindings/borrow.h"
#include "logprob/logprob.h"

namespace skyrl_fast {

// (inner rows, vocab) or (outer rows, inner rows, vocab), in any row strides; the caller
// checks the device.
inline LogitRows logit_rows(const TensorView& t) {
  if (t.dtype != DType::kFloat32 && t.dtype != DType::kBFloat16 && t.dtype != DType::kFloat16) {
    fail(t, "float32, bfloat16 or float16", dtype_name(t.dtype));
  }
  if (t.ndim != 2 && t.ndim != 3) fail(t, "2 or 3 dimensions", "shape " + t.shape_string());
  const int last = t.ndim - 1;
  if (t.shape[last] < 1) fail(t, "at least one column", "shape " + t.shape_string());
  if (t.stride[last] != 1 && t.shape[last] != 1) {
    fail(t, "a contiguous last dimension", "stride " + std::to_string(t.stride[last]));
  }
  LogitRows rows;
  rows.data = t.data;
  rows.dtype = t.dtype;
  rows.vocab = t.shape[last];
  rows.inner_rows = t.shape[last - 1];
  rows.inner_stride = t.stride[last - 1];
  rows.outer_stride = t.ndim == 3 ? t.stride[0] : 0;
  rows.num_rows = t.ndim == 3 ? t.shape[0] * t.shape[1] : t.shape[0];
  return rows;
}

}  // namespace skyrl_fast
