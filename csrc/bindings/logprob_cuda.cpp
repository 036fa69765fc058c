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

void check_cuda_vector(const TensorView& t, DType dtype, const TensorView& logits) {
  check_dtype(t, dtype);
  check_ndim(t, 1);
  check_contiguous(t);
  check_size(t, 0, logits.shape[0]);
  if (t.device != Device::kCuda || t.device_index != logits.device_index) {
    fail(t, "on the device of logits", "a tensor on another device");
  }
}

void check_rows(const TensorView& t) {
  if (t.device != Device::kCuda) fail(t, "on a CUDA device", "a tensor on another device");
  check_ndim(t, 2);
  if (t.shape[1] > 1 && t.stride[1] != 1) fail(t, "contiguous along the vocabulary", "strides");
}

template <typename T>
T* pointer(const std::optional<Borrowed>& t) {
  return t ? (*t)->ptr<T>() : nullptr;
}

void forward(py::handle logits_obj, py::handle targets_obj, py::handle mask_obj, float temperature,
             py::handle logprob_obj, py::handle lse_obj, py::handle entropy_obj, uintptr_t stream) {
  Borrowed logits(logits_obj, kOp, "logits");
  Borrowed targets(targets_obj, kOp, "target_ids");
  Borrowed logprob(logprob_obj, kOp, "logprob");
  Borrowed lse(lse_obj, kOp, "lse");
  std::optional<Borrowed> mask, entropy;
  borrow_optional(mask_obj, "mask", mask);
  borrow_optional(entropy_obj, "entropy", entropy);
  check_rows(*logits);
  check_cuda_vector(*targets, DType::kInt64, *logits);
  check_cuda_vector(*logprob, DType::kFloat32, *logits);
  check_cuda_vector(*lse, DType::kFloat32, *logits);
  if (mask) check_cuda_vector(**mask, DType::kUInt8, *logits);
  if (entropy) check_cuda_vector(**entropy, DType::kFloat32, *logits);
  py::gil_scoped_release release;
  DeviceGuard guard(logits->device_index);
  selected_logprob_cuda(logits->data, logits->dtype, logits->shape[0], logits->shape[1],
                        logits->stride[0], targets->ptr<int64_t>(), pointer<uint8_t>(mask),
                        temperature, logprob->ptr<float>(), lse->ptr<float>(),
                        pointer<float>(entropy), reinterpret_cast<cudaStream_t>(stream));
}

void backward(py::handle logits_obj, py::handle targets_obj, py::handle mask_obj, float temperature,
              py::handle lse_obj, py::handle entropy_obj, py::handle grad_logprob_obj,
              py::handle grad_entropy_obj, py::handle grad_obj, uintptr_t stream) {
  Borrowed logits(logits_obj, kOp, "logits");
  Borrowed targets(targets_obj, kOp, "target_ids");
  Borrowed lse(lse_obj, kOp, "lse");
  Borrowed grad_logprob(grad_logprob_obj, kOp, "grad_logprob");
  Borrowed grad(grad_obj, kOp, "grad_logits");
  std::optional<Borrowed> mask, entropy, grad_entropy;
  borrow_optional(mask_obj, "mask", mask);
  borrow_optional(entropy_obj, "entropy", entropy);
  borrow_optional(grad_entropy_obj, "grad_entropy", grad_entropy);
  check_rows(*logits);
  check_rows(*grad);
  check_dtype(*grad, logits->dtype);
  check_size(*grad, 0, logits->shape[0]);
  check_size(*grad, 1, logits->shape[1]);
  check_cuda_vector(*targets, DType::kInt64, *logits);
  check_cuda_vector(*lse, DType::kFloat32, *logits);
  check_cuda_vector(*grad_logprob, DType::kFloat32, *logits);
  if (mask) check_cuda_vector(**mask, DType::kUInt8, *logits);
  if (entropy) check_cuda_vector(**entropy, DType::kFloat32, *logits);
  if (grad_entropy) check_cuda_vector(**grad_entropy, DType::kFloat32, *logits);
  py::gil_scoped_release release;
  DeviceGuard guard(logits->device_index);
  selected_logprob_backward_cuda(
      logits->data, logits->dtype, logits->shape[0], logits->shape[1], logits->stride[0],
      targets->ptr<int64_t>(), pointer<uint8_t>(mask), temperature, lse->ptr<float>(),
      pointer<float>(entropy), grad_logprob->ptr<float>(), pointer<float>(grad_entropy), grad->data,
      grad->stride[0], reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

void bind_logprob_cuda(py::module_& m) {
  m.def("selected_logprob_cuda", &forward);
  m.def("selected_logprob_backward_cuda", &backward);
}

}  // namespace skyrl_fast
