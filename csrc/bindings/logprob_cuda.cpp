// selected_logprob on CUDA tensors: checks, device guard, launch.
#include "logprob_cuda.h"

#include <optional>

#include "bindings/borrow.h"
#include "bindings/ops.h"
#include "cuda.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "selected_logprob";

// An optional tensor argument: None gives a null view.
std::optional<Borrowed>& borrow_optional(py::handle object, const char* name,
                                         std::optional<Borrowed>& slot) {
  if (!object.is_none()) slot.emplace(object, kOp, name);
  return slot;
}

// (rows, vocab), or (outer, rows, vocab) where rows have two strides: one launch per outer index.
struct Slices {
  explicit Slices(const TensorView& t) : view(t) {
    if (t.device != Device::kCuda) fail(t, "on a CUDA device", "a tensor on another device");
    if (t.ndim != 2 && t.ndim != 3) fail(t, "2- or 3-dimensional", "shape " + t.shape_string());
    const int last = t.ndim - 1;
    if (t.shape[last] > 1 && t.stride[last] != 1) {
      fail(t, "contiguous in the last dimension", "stride " + std::to_string(t.stride[last]));
    }
    num_outer = t.ndim == 3 ? t.shape[0] : 1;
    outer_stride = t.ndim == 3 ? t.stride[0] : 0;
    rows = t.shape[last - 1];
    row_stride = t.stride[last - 1];
    vocab = t.shape[last];
  }
  void* slice(int64_t outer) const {
    const int64_t element_bytes = view.dtype == DType::kFloat32 ? 4 : 2;
    return static_cast<char*>(view.data) + outer * outer_stride * element_bytes;
  }
  const TensorView& view;
  int64_t num_outer, outer_stride, rows, row_stride, vocab;
};

void check_per_row(const TensorView& t, DType dtype, const Slices& logits) {
  check_dtype(t, dtype);
  check_ndim(t, 1);
  check_contiguous(t);
  check_size(t, 0, logits.num_outer * logits.rows);
  if (t.device != Device::kCuda || t.device_index != logits.view.device_index) {
    fail(t, "on the device of logits", "a tensor on another device");
  }
}

// The data of an optional per-row argument at `offset`, or null.
template <typename T>
T* at(const std::optional<Borrowed>& t, int64_t offset) {
  return t ? (*t)->ptr<T>() + offset : nullptr;
}

void forward(py::handle logits_obj, py::handle targets_obj, py::handle mask_obj, double temperature,
             py::handle logprob_obj, py::handle lse_obj, py::handle entropy_obj, uintptr_t stream) {
  Borrowed logits(logits_obj, kOp, "logits");
  Borrowed targets(targets_obj, kOp, "target_ids");
  Borrowed logprob(logprob_obj, kOp, "logprob");
  Borrowed lse(lse_obj, kOp, "lse");
  std::optional<Borrowed> mask, entropy;
  borrow_optional(mask_obj, "mask", mask);
  borrow_optional(entropy_obj, "entropy", entropy);
  const Slices slices(*logits);
  check_per_row(*targets, DType::kInt64, slices);
  check_per_row(*logprob, DType::kFloat32, slices);
  check_per_row(*lse, DType::kFloat64, slices);
  if (mask) check_per_row(**mask, DType::kUInt8, slices);
  if (entropy) check_per_row(**entropy, DType::kFloat32, slices);
  py::gil_scoped_release release;
  DeviceGuard guard(logits->device_index);
  for (int64_t outer = 0; outer < slices.num_outer; ++outer) {
    const int64_t first = outer * slices.rows;
    selected_logprob_cuda(slices.slice(outer), logits->dtype, slices.rows, slices.vocab,
                          slices.row_stride, targets->ptr<int64_t>() + first,
                          at<uint8_t>(mask, first), static_cast<float>(temperature),
                          logprob->ptr<float>() + first, lse->ptr<double>() + first,
                          at<float>(entropy, first), reinterpret_cast<cudaStream_t>(stream));
  }
}

void backward(py::handle logits_obj, py::handle targets_obj, py::handle mask_obj,
              double temperature, py::handle lse_obj, py::handle entropy_obj,
              py::handle grad_logprob_obj, py::handle grad_entropy_obj, py::handle grad_obj,
              uintptr_t stream) {
  Borrowed logits(logits_obj, kOp, "logits");
  Borrowed targets(targets_obj, kOp, "target_ids");
  Borrowed lse(lse_obj, kOp, "lse");
  Borrowed grad(grad_obj, kOp, "grad");
  std::optional<Borrowed> mask, entropy, grad_logprob, grad_entropy;
  borrow_optional(mask_obj, "mask", mask);
  borrow_optional(entropy_obj, "entropy", entropy);
  borrow_optional(grad_logprob_obj, "grad_logprob", grad_logprob);
  borrow_optional(grad_entropy_obj, "grad_entropy", grad_entropy);
  const Slices slices(*logits), grad_slices(*grad);
  check_dtype(*grad, logits->dtype);
  if (grad->shape_string() != logits->shape_string()) {
    fail(*grad, "of shape " + logits->shape_string(), "shape " + grad->shape_string());
  }
  check_per_row(*targets, DType::kInt64, slices);
  check_per_row(*lse, DType::kFloat64, slices);
  if (mask) check_per_row(**mask, DType::kUInt8, slices);
  if (entropy) check_per_row(**entropy, DType::kFloat32, slices);
  if (grad_logprob) check_per_row(**grad_logprob, DType::kFloat32, slices);
  if (grad_entropy) check_per_row(**grad_entropy, DType::kFloat32, slices);
  py::gil_scoped_release release;
  DeviceGuard guard(logits->device_index);
  for (int64_t outer = 0; outer < slices.num_outer; ++outer) {
    const int64_t first = outer * slices.rows;
    selected_logprob_backward_cuda(
        slices.slice(outer), logits->dtype, slices.rows, slices.vocab, slices.row_stride,
        targets->ptr<int64_t>() + first, at<uint8_t>(mask, first), static_cast<float>(temperature),
        lse->ptr<double>() + first, at<float>(entropy, first), at<float>(grad_logprob, first),
        at<float>(grad_entropy, first), grad_slices.slice(outer), grad_slices.row_stride,
        reinterpret_cast<cudaStream_t>(stream));
  }
}

}  // namespace

void bind_logprob_cuda(py::module_& m) {
  m.def("selected_logprob_cuda", &forward);
  m.def("selected_logprob_backward_cuda", &backward);
}

}  // namespace skyrl_fast
