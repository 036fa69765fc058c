// policy_loss on CUDA tensors: checks, launches.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "bindings/cuda_arguments.h"
#include "bindings/ops.h"
#include "policy_loss/cells_bind.h"
#include "policy_loss/loss_params_bind.h"
#include "policy_loss/policy_loss_cuda.h"

namespace skyrl_fast {
namespace {

constexpr char kPolicyLossOp[] = "policy_loss";
constexpr char kKlOp[] = "kl_penalty";

// Cells on the device of `like`, in its shape.
template <typename T>
T* cells(const TensorView& t, DType dtype, const TensorView& like) {
  check_same_device(t, like);
  check_dtype(t, dtype);
  check_contiguous(t);
  if (t.shape_string() != like.shape_string()) {
    fail(t, "shape " + like.shape_string(), "shape " + t.shape_string());
  }
  return t.ptr<T>();
}

template <typename T>
T* cells_or_null(py::handle object, const char* name, DType dtype, const TensorView& like) {
  // an argument of the call, so the tensor outlives it
  return object.is_none() ? nullptr : cells<T>(*Borrowed(object, like.op, name), dtype, like);
}

// Cells of `t`: (N, R) padded, or (A,) with offsets, of which only the shape is read.
RowLayout rows_on_cuda(const TensorView& t, const std::optional<Borrowed>& cu) {
  check_cuda(t);
  check_contiguous(t);
  check_ndim(t, cu ? 1 : 2);
  RowLayout rows;
  if (cu) {
    rows.num_rows = (*cu)->shape[0] - 1;
    if (rows.num_rows < 0 || (rows.num_rows == 0 && t.shape[0] > 0)) {
      fail(**cu, "offsets of rows", "shape " + (*cu)->shape_string());
    }
    rows.cu = cuda_array<int32_t>(**cu, DType::kInt32, rows.num_rows + 1, t);
  } else {
    rows.num_rows = t.shape[0];
    rows.width = t.shape[1];
  }
  return rows;
}

LossMask mask_on_cuda(const TensorView& t, const TensorView& like) {
  return {cells<void>(t, t.dtype, like), mask_type(t)};
}

void policy_loss(py::handle logprobs_obj, py::handle old_logprobs, py::handle advantages,
                 py::handle mask_obj, py::handle row_weights_obj, py::handle cu_obj,
                 py::handle reference, py::handle token_weights, py::handle cross_entropy_weights,
                 py::handle kl_weights, py::handle selected, py::handle sequence_delta_obj,
                 int loss, int kl, const std::vector<double>& params, py::handle grad_obj,
                 py::handle metrics_obj, py::handle partial_obj, uintptr_t stream) {
  const Borrowed logprobs(logprobs_obj, kPolicyLossOp, "logprobs"),
      mask(mask_obj, kPolicyLossOp, "loss_mask");
  const Borrowed row_weights(row_weights_obj, kPolicyLossOp, "row_weights");
  const Borrowed metrics(metrics_obj, kPolicyLossOp, "metrics"),
      partial(partial_obj, kPolicyLossOp, "partial");
  std::optional<Borrowed> cu;
  if (!cu_obj.is_none()) cu.emplace(cu_obj, kPolicyLossOp, "cu_seqlens");
  const RowLayout rows = rows_on_cuda(*logprobs, cu);
  const MaybeOnCuda sequence_delta(sequence_delta_obj, kPolicyLossOp, "sequence_delta");
  check_loss(kPolicyLossOp, loss, kl, !advantages.is_none(), !reference.is_none(),
             static_cast<bool>(sequence_delta));
  const int64_t num_cells = logprobs->numel();
  const int64_t num_sums = (num_cells + kCellsPerSum - 1) / kCellsPerSum * kNumLossSums;
  LossSums* const partial_data = reinterpret_cast<LossSums*>(
      cuda_array<double>(*partial, DType::kFloat64, num_sums, *logprobs));
  double* const metrics_data =
      cuda_array<double>(*metrics, DType::kFloat64, kNumPolicyLossMetrics, *logprobs);
  with_float(*logprobs, [&](auto zero) {
    using T = decltype(zero);
    constexpr DType kType = kDTypeOf<T>;
    const TensorView& like = *logprobs;
    PolicyLossInputs<T> in;
    in.rows = rows;
    in.mask = mask_on_cuda(*mask, like);
    in.logprobs = like.ptr<T>();
    in.old_logprobs = cells_or_null<T>(old_logprobs, "old_logprobs", kType, like);
    in.advantages = cells_or_null<T>(advantages, "advantages", kType, like);
    in.reference = cells_or_null<T>(reference, "ref_logprobs", kType, like);
    in.token_weights = cells_or_null<T>(token_weights, "token_weights", kType, like);
    in.cross_entropy_weights =
        cells_or_null<T>(cross_entropy_weights, "cross_entropy_weights", kType, like);
    in.kl_weights = cells_or_null<T>(kl_weights, "kl_weights", kType, like);
    in.selected = cells_or_null<uint8_t>(selected, "selected", DType::kUInt8, like);
    in.sequence_delta = sequence_delta.array<double>(DType::kFloat64, rows.num_rows, like);
    in.row_weights = cuda_array<T>(*row_weights, kType, rows.num_rows, like);
    T* const grad = cells_or_null<T>(grad_obj, "grad", kType, like);
    const LossParams<T> p = loss_params<T>(kPolicyLossOp, params);
    py::gil_scoped_release release;
    policy_loss_cuda<T>(static_cast<LossKind>(loss), static_cast<KlKind>(kl), p, in, num_cells,
                        grad, partial_data, metrics_data, stream_of(stream));
  });
}

void scale_cells(py::handle cells_obj, py::handle factor_obj, uintptr_t stream) {
  const Borrowed grad(cells_obj, kPolicyLossOp, "grad"),
      factor(factor_obj, kPolicyLossOp, "grad_loss");
  check_cuda(*grad);
  check_contiguous(*grad);
  with_float(*grad, [&](auto zero) {
    using T = decltype(zero);
    const T* const factor_data = cuda_array<T>(*factor, kDTypeOf<T>, 1, *grad);
    py::gil_scoped_release release;
    scale_cells_cuda<T>(grad->ptr<T>(), grad->numel(), factor_data, stream_of(stream));
  });
}

void kl_penalty(py::handle logprobs_obj, py::handle reference_obj, py::handle mask_obj, int kl,
                py::handle grad_out, py::handle out_obj, uintptr_t stream) {
  const Borrowed logprobs(logprobs_obj, kKlOp, "logprobs"), mask(mask_obj, kKlOp, "loss_mask");
  const Borrowed reference(reference_obj, kKlOp, "ref_logprobs"), out(out_obj, kKlOp, "out");
  check_cuda(*logprobs);
  check_contiguous(*logprobs);
  const LossMask loss_mask = mask_on_cuda(*mask, *logprobs);
  with_float(*logprobs, [&](auto zero) {
    using T = decltype(zero);
    constexpr DType kType = kDTypeOf<T>;
    const TensorView& like = *logprobs;
    const T* const reference_data = cells<T>(*reference, kType, like);
    const T* const upstream = cells_or_null<T>(grad_out, "grad_out", kType, like);
    T* const out_data = cells<T>(*out, kType, like);
    py::gil_scoped_release release;
    kl_penalty_cuda<T>(static_cast<KlKind>(kl), like.ptr<T>(), reference_data, loss_mask, upstream,
                       like.numel(), out_data, stream_of(stream));
  });
}

void delta_sums(py::handle a_obj, py::handle b_obj, py::handle mask_obj, py::handle cu_obj,
                py::handle sums_obj, uintptr_t stream) {
  const Borrowed a(a_obj, kPolicyLossOp, "logprobs"), b(b_obj, kPolicyLossOp, "old_logprobs");
  const Borrowed mask(mask_obj, kPolicyLossOp, "loss_mask"), sums(sums_obj, kPolicyLossOp, "sums");
  std::optional<Borrowed> cu;
  if (!cu_obj.is_none()) cu.emplace(cu_obj, kPolicyLossOp, "cu_seqlens");
  const RowLayout rows = rows_on_cuda(*a, cu);
  const LossMask loss_mask = mask_on_cuda(*mask, *a);
  check_same_device(*sums, *a);
  check_dtype(*sums, DType::kFloat64);
  check_ndim(*sums, 2);
  check_contiguous(*sums);
  check_size(*sums, 0, rows.num_rows);
  check_size(*sums, 1, 2);
  with_float(*a, [&](auto zero) {
    using T = decltype(zero);
    const T* const b_data = cells<T>(*b, kDTypeOf<T>, *a);
    py::gil_scoped_release release;
    delta_sums_cuda<T>(a->ptr<T>(), b_data, loss_mask, rows, sums->ptr<double>(),
                       stream_of(stream));
  });
}

}  // namespace

void bind_policy_loss_cuda(py::module_& m) {
  m.attr("cells_per_sum") = kCellsPerSum;
  m.attr("num_loss_sums") = kNumLossSums;
  m.def("policy_loss_cuda", &policy_loss, py::arg("logprobs"), py::arg("old_logprobs"),
        py::arg("advantages"), py::arg("mask"), py::arg("row_weights"), py::arg("cu_seqlens"),
        py::arg("ref_logprobs"), py::arg("token_weights"), py::arg("cross_entropy_weights"),
        py::arg("kl_weights"), py::arg("selected"), py::arg("sequence_delta"), py::arg("loss"),
        py::arg("kl"), py::arg("params"), py::arg("grad"), py::arg("metrics"), py::arg("partial"),
        py::arg("stream"));
  m.def("scale_cells_cuda", &scale_cells, py::arg("cells"), py::arg("factor"), py::arg("stream"));
  m.def("kl_penalty_cuda", &kl_penalty, py::arg("logprobs"), py::arg("ref_logprobs"),
        py::arg("mask"), py::arg("kl"), py::arg("grad_out"), py::arg("out"), py::arg("stream"));
  m.def("delta_sums_cuda", &delta_sums, py::arg("a"), py::arg("b"), py::arg("mask"),
        py::arg("cu_seqlens"), py::arg("sums"), py::arg("stream"));
}

}  // namespace skyrl_fast
