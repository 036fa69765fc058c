// The arguments that ops on rows share: rewards, ends of trajectories, offsets, mask and output.
#pragma once

#include <optional>
#include <string>

#include "bindings/borrow.h"
#include "core/row_layout.h"

namespace skyrl_fast {

// Borrows and checks the arguments. Rewards are float32 (N,), (N, R) or, with offsets, (A,); the
// output is float32 (N,), (N, R) or, with offsets, (A,), and so is the mask.
class RowArguments {
 public:
  RowArguments(const char* op, const char* mask_name, int64_t num_rows, py::handle rewards,
               py::handle is_last_step, py::handle mask, py::handle cu_seqlens,
               bool rewards_are_ragged, py::handle out);

  const float* rewards() const { return rewards_->ptr<float>(); }
  const RowLayout& rewards_layout() const { return rewards_layout_; }
  bool rewards_per_row() const { return rewards_->ndim == 1 && rewards_layout_.cu == nullptr; }
  const uint8_t* is_last_step() const {
    return is_last_step_ ? (*is_last_step_)->ptr<uint8_t>() : nullptr;
  }
  const RowLayout& layout() const { return layout_; }
  float* out() const { return out_->ptr<float>(); }

  // Another float32 array in the shape of the output.
  float* like_out(const Borrowed& array) const;

  // Calls fn(pointer to the mask's cells): null, uint8_t, int64_t or float.
  template <typename Fn>
  void with_mask(const Fn& fn) const {
    if (!mask_) return fn(static_cast<const float*>(nullptr));
    switch ((*mask_)->dtype) {
      case DType::kBool:
      case DType::kUInt8: return fn((*mask_)->ptr<const uint8_t>());
      case DType::kInt64: return fn((*mask_)->ptr<const int64_t>());
      case DType::kFloat32: return fn((*mask_)->ptr<const float>());
      default: fail(**mask_, "bool, uint8, int64 or float32", dtype_name((*mask_)->dtype));
    }
  }

 private:
  Borrowed rewards_, out_;
  std::optional<Borrowed> cu_, is_last_step_, mask_;
  RowLayout rewards_layout_, layout_;
};

}  // namespace skyrl_fast
