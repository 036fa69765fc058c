// Checks of the arguments that ops on rows share.
#include "bindings/row_arguments.h"

namespace skyrl_fast {
namespace {

void check_floats(const TensorView& t) {
  check_cpu(t);
  check_dtype(t, DType::kFloat32);
  check_contiguous(t);
}

// (N,) or (N, R)
void check_rows(const TensorView& t, int64_t num_rows) {
  if (t.ndim != 1 && t.ndim != 2) fail(t, "(N,) or (N, R)", t.shape_string());
  check_size(t, 0, num_rows);
}

void check_cu_seqlens(const TensorView& cu, int64_t num_rows, int64_t num_cells) {
  check_cpu_array(cu, DType::kInt32, 1);
  check_size(cu, 0, num_rows + 1);
  const int32_t* p = cu.ptr<int32_t>();
  if (p[0] != 0 || p[num_rows] != num_cells) {
    fail(cu, "offsets from 0 to " + std::to_string(num_cells),
         "offsets from " + std::to_string(p[0]) + " to " + std::to_string(p[num_rows]));
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    if (p[i + 1] < p[i]) {
      fail(cu, "non-decreasing offsets", "a step back at row " + std::to_string(i));
    }
  }
}

RowLayout layout_of(const TensorView& t, const TensorView* cu, int64_t num_rows) {
  RowLayout layout;
  layout.num_rows = num_rows;
  if (cu != nullptr) {
    layout.cu = cu->ptr<int32_t>();
  } else {
    layout.width = t.ndim == 2 ? t.shape[1] : 1;
  }
  return layout;
}

void check_same_shape(const TensorView& t, const TensorView& out) {
  if (t.shape_string() != out.shape_string()) {
    fail(t, "shape " + out.shape_string(), t.shape_string());
  }
}

}  // namespace

RowArguments::RowArguments(const char* op, const char* mask_name, int64_t num_rows,
                           py::handle rewards, py::handle is_last_step, py::handle mask,
                           py::handle cu_seqlens, bool rewards_are_ragged, py::handle out)
    : rewards_(rewards, op, "rewards"), out_(out, op, mask_name) {
  check_floats(*rewards_);
  check_floats(*out_);
  if (cu_seqlens.is_none()) {
    check_rows(*out_, num_rows);
  } else {
    cu_.emplace(cu_seqlens, op, "cu_seqlens");
    check_ndim(*out_, 1);
    check_cu_seqlens(**cu_, num_rows, out_->numel());
  }
  if (rewards_are_ragged) {
    check_ndim(*rewards_, 1);
    check_size(*rewards_, 0, out_->numel());
  } else {
    check_rows(*rewards_, num_rows);
  }
  if (!is_last_step.is_none()) {
    is_last_step_.emplace(is_last_step, op, "is_last_step");
    check_cpu(**is_last_step_);
    check_ndim(**is_last_step_, 1);
    check_contiguous(**is_last_step_);
    const DType dtype = (*is_last_step_)->dtype;
    if (dtype != DType::kBool && dtype != DType::kUInt8) {
      fail(**is_last_step_, "bool", dtype_name(dtype));
    }
    check_size(**is_last_step_, 0, num_rows);
  }
  if (!mask.is_none()) {
    mask_.emplace(mask, op, mask_name);
    check_cpu(**mask_);
    check_contiguous(**mask_);
    check_same_shape(**mask_, *out_);
  }
  const TensorView* cu = cu_ ? &**cu_ : nullptr;
  rewards_layout_ = layout_of(*rewards_, rewards_are_ragged ? cu : nullptr, num_rows);
  layout_ = layout_of(*out_, cu, num_rows);
}

float* RowArguments::like_out(const Borrowed& array) const {
  check_floats(*array);
  check_same_shape(*array, *out_);
  return array->ptr<float>();
}

}  // namespace skyrl_fast
