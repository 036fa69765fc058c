// policy_loss and kl_penalty: checks, then the launchers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/borrow.h"
#include "bindings/ops.h"
#include "policy_loss/cells_bind.h"
#include "policy_loss/loss_params_bind.h"
#include "policy_loss/policy_loss.h"

namespace skyrl_fast {
namespace {

void policy_loss(py::handle logprobs_obj, py::handle old_logprobs_obj, py::handle advantages_obj,
                 py::handle mask_obj, py::handle row_weights_obj, py::handle cu_obj,
                 py::handle reference_obj, py::handle token_weights_obj,
                 py::handle cross_entropy_weights_obj, py::handle kl_weights_obj,
                 py::handle selected_obj, py::handle sequence_delta_obj, int loss, int kl,
                 const std::vector<double>& params, py::handle grad_obj, py::handle metrics_obj,
                 int num_threads) {
  constexpr char kOp[] = "policy_loss";
  Borrowed logprobs(logprobs_obj, kOp, "logprobs");
  Borrowed mask(mask_obj, kOp, "loss_mask");
  Borrowed row_weights(row_weights_obj, kOp, "row_weights");
  Borrowed metrics(metrics_obj, kOp, "metrics");
  Optional cu, old_logprobs, advantages, reference, selected, sequence_delta, grad;
  Optional token_weights, cross_entropy_weights, kl_weights;
  if (!cu_obj.is_none()) cu.emplace(cu_obj, kOp, "cu_seqlens");
  const RowLayout rows = layout_of(*logprobs, cu);
  const int64_t num_rows = rows.num_rows;
  check_cpu_array(*metrics, DType::kFloat64, 1);
  check_size(*metrics, 0, kNumPolicyLossMetrics);
  const LossMask loss_mask = mask_of(*mask, *logprobs);
  if (!sequence_delta_obj.is_none()) {
    sequence_delta.emplace(sequence_delta_obj, kOp, "sequence_delta");
    check_cpu_array(**sequence_delta, DType::kFloat64, 1);
    check_size(**sequence_delta, 0, num_rows);
  }
  const LossKind kind = static_cast<LossKind>(loss);
  const KlKind kl_kind = static_cast<KlKind>(kl);
  check_loss(kOp, loss, kl, !advantages_obj.is_none(), !reference_obj.is_none(),
             sequence_delta.has_value());
  with_float(*logprobs, [&](auto zero) {
    using T = decltype(zero);
    constexpr DType kType = kDTypeOf<T>;
    PolicyLossInputs<T> in;
    in.rows = rows;
    in.mask = loss_mask;
    in.logprobs = logprobs->ptr<T>();
    in.old_logprobs =
        optional_like<T>(old_logprobs_obj, kOp, "old_logprobs", kType, *logprobs, &old_logprobs);
    in.advantages =
        optional_like<T>(advantages_obj, kOp, "advantages", kType, *logprobs, &advantages);
    in.reference =
        optional_like<T>(reference_obj, kOp, "ref_logprobs", kType, *logprobs, &reference);
    in.token_weights =
        optional_like<T>(token_weights_obj, kOp, "token_weights", kType, *logprobs, &token_weights);
    in.cross_entropy_weights =
        optional_like<T>(cross_entropy_weights_obj, kOp, "cross_entropy_weights", kType, *logprobs,
                         &cross_entropy_weights);
    in.kl_weights =
        optional_like<T>(kl_weights_obj, kOp, "kl_weights", kType, *logprobs, &kl_weights);
    in.selected =
        optional_like<uint8_t>(selected_obj, kOp, "selected", DType::kUInt8, *logprobs, &selected);
    in.sequence_delta = sequence_delta ? (*sequence_delta)->ptr<double>() : nullptr;
    check_cpu_array(*row_weights, kType, 1);
    check_size(*row_weights, 0, num_rows);
    in.row_weights = row_weights->ptr<T>();
    if (!grad_obj.is_none()) {
      grad.emplace(grad_obj, kOp, "grad");
      check_like(**grad, kType, *logprobs);
    }
    const LossParams<T> p = loss_params<T>(kOp, params);
    T* grad_data = grad ? (*grad)->template ptr<T>() : nullptr;
    double* metrics_data = metrics->ptr<double>();
    py::gil_scoped_release release;
    policy_loss_cpu<T>(kind, kl_kind, p, in, grad_data, metrics_data, num_threads);
  });
}

void kl_penalty(py::handle logprobs_obj, py::handle reference_obj, py::handle mask_obj, int kl,
                py::handle grad_out_obj, py::handle out_obj, int num_threads) {
  constexpr char kOp[] = "kl_penalty";
  Borrowed logprobs(logprobs_obj, kOp, "logprobs");
  Borrowed reference(reference_obj, kOp, "ref_logprobs");
  Borrowed mask(mask_obj, kOp, "loss_mask");
  Borrowed out(out_obj, kOp, "out");
  Optional grad_out;
  check_cpu(*logprobs);
  check_contiguous(*logprobs);
  const LossMask loss_mask = mask_of(*mask, *logprobs);
  with_float(*logprobs, [&](auto zero) {
    using T = decltype(zero);
    check_like(*reference, kDTypeOf<T>, *logprobs);
    check_like(*out, kDTypeOf<T>, *logprobs);
    const T* upstream =
        optional_like<T>(grad_out_obj, kOp, "grad_out", kDTypeOf<T>, *logprobs, &grad_out);
    py::gil_scoped_release release;
    kl_penalty_cpu<T>(static_cast<KlKind>(kl), logprobs->ptr<T>(), reference->ptr<T>(), loss_mask,
                      upstream, logprobs->numel(), out->ptr<T>(), num_threads);
  });
}

void mask_counts(py::handle mask_obj, py::handle cu_obj, py::handle counts_obj, int num_threads) {
  constexpr char kOp[] = "reduction_weights";
  Borrowed mask(mask_obj, kOp, "loss_mask");
  Borrowed counts(counts_obj, kOp, "counts");
  Optional cu;
  if (!cu_obj.is_none()) cu.emplace(cu_obj, kOp, "cu_seqlens");
  const RowLayout rows = layout_of(*mask, cu);
  const LossMask loss_mask = mask_of(*mask, *mask);
  check_cpu_array(*counts, DType::kInt64, 1);
  check_size(*counts, 0, rows.num_rows);
  py::gil_scoped_release release;
  mask_counts_cpu(loss_mask, rows, counts->ptr<int64_t>(), num_threads);
}

void delta_sums(py::handle a_obj, py::handle b_obj, py::handle mask_obj, py::handle cu_obj,
                py::handle sums_obj, int num_threads) {
  constexpr char kOp[] = "policy_loss";
  Borrowed a(a_obj, kOp, "logprobs"), b(b_obj, kOp, "old_logprobs");
  Borrowed mask(mask_obj, kOp, "loss_mask"), sums(sums_obj, kOp, "sums");
  Optional cu;
  if (!cu_obj.is_none()) cu.emplace(cu_obj, kOp, "cu_seqlens");
  const RowLayout rows = layout_of(*a, cu);
  const LossMask loss_mask = mask_of(*mask, *a);
  check_cpu_array(*sums, DType::kFloat64, 2);
  check_size(*sums, 0, rows.num_rows);
  check_size(*sums, 1, 2);
  with_float(*a, [&](auto zero) {
    using T = decltype(zero);
    check_like(*b, kDTypeOf<T>, *a);
    py::gil_scoped_release release;
    delta_sums_cpu<T>(a->ptr<T>(), b->ptr<T>(), loss_mask, rows, sums->ptr<double>(), num_threads);
  });
}

}  // namespace

void bind_policy_loss(py::module_& m) {
  m.def("policy_loss", &policy_loss, py::arg("logprobs"), py::arg("old_logprobs"),
        py::arg("advantages"), py::arg("mask"), py::arg("row_weights"), py::arg("cu_seqlens"),
        py::arg("ref_logprobs"), py::arg("token_weights"), py::arg("cross_entropy_weights"),
        py::arg("kl_weights"), py::arg("selected"), py::arg("sequence_delta"), py::arg("loss"),
        py::arg("kl"), py::arg("params"), py::arg("grad"), py::arg("metrics"),
        py::arg("num_threads"));
  m.def("kl_penalty", &kl_penalty, py::arg("logprobs"), py::arg("ref_logprobs"), py::arg("mask"),
        py::arg("kl"), py::arg("grad_out"), py::arg("out"), py::arg("num_threads"));
  m.def("mask_counts", &mask_counts, py::arg("mask"), py::arg("cu_seqlens"), py::arg("counts"),
        py::arg("num_threads"));
  m.def("delta_sums", &delta_sums, py::arg("a"), py::arg("b"), py::arg("mask"),
        py::arg("cu_seqlens"), py::arg("sums"), py::arg("num_threads"));
}

}  // namespace skyrl_fast
