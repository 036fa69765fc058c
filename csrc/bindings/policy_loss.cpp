// policy_loss, kl_penalty and off_policy_correction: checks, then the launchers.
#include "policy_loss.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/borrow.h"
#include "bindings/ops.h"

namespace skyrl_fast {
namespace {

using Optional = std::optional<Borrowed>;

void check_like(const TensorView& t, DType dtype, const TensorView& like) {
  check_cpu(t);
  check_dtype(t, dtype);
  check_contiguous(t);
  if (t.shape_string() != like.shape_string()) {
    fail(t, "of shape " + like.shape_string(), "shape " + t.shape_string());
  }
}

// Cells of `t`: (N, R) padded, or (A,) with offsets.
RowLayout layout_of(const TensorView& t, const Optional& cu) {
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
    if (p[i + 1] < p[i]) fail(**cu, "non-decreasing", "a step back at row " + std::to_string(i));
  }
  rows.num_rows = num_rows;
  rows.cu = p;
  return rows;
}

LossMask mask_of(const TensorView& t, const TensorView& like) {
  LossMask mask;
  mask.data = t.data;
  switch (t.dtype) {
    case DType::kBool:
    case DType::kUInt8: mask.type = MaskType::kUInt8; break;
    case DType::kInt64: mask.type = MaskType::kInt64; break;
    case DType::kFloat32: mask.type = MaskType::kFloat32; break;
    default: fail(t, "bool, uint8, int64 or float32", dtype_name(t.dtype));
  }
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
LossParams<T> params_of(const std::vector<double>& values) {
  constexpr size_t kNumParams = 9;
  if (values.size() != kNumParams) {
    throw std::invalid_argument("policy_loss: params must be 9 numbers, got " +
                                std::to_string(values.size()));
  }
  LossParams<T> p;
  T* const fields[kNumParams] = {&p.clip_low,   &p.clip_high,   &p.clip_ratio_c,
                                 &p.tau_pos,    &p.tau_neg,     &p.delta_low,
                                 &p.delta_high, &p.ppo_kl_coef, &p.kl_coef};
  for (size_t i = 0; i < kNumParams; ++i) *fields[i] = static_cast<T>(values[i]);
  return p;
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

void policy_loss(py::handle logprobs_obj, py::handle anchor_obj, py::handle advantages_obj,
                 py::handle mask_obj, py::handle row_weights_obj, py::handle cu_obj,
                 py::handle reference_obj, py::handle token_weights_obj, py::handle selected_obj,
                 py::handle sequence_delta_obj, int loss, int kl, const std::vector<double>& params,
                 py::handle grad_obj, py::handle metrics_obj, int num_threads) {
  constexpr char kOp[] = "policy_loss";
  Borrowed logprobs(logprobs_obj, kOp, "logprobs");
  Borrowed mask(mask_obj, kOp, "loss_mask");
  Borrowed row_weights(row_weights_obj, kOp, "row_weights");
  Borrowed metrics(metrics_obj, kOp, "metrics");
  Optional cu, anchor, advantages, reference, token_weights, selected, sequence_delta, grad;
  if (!cu_obj.is_none()) cu.emplace(cu_obj, kOp, "cu_seqlens");
  const RowLayout rows = layout_of(*logprobs, cu);
  const int64_t num_rows = rows.num_rows;
  check_cpu_array(*row_weights, DType::kFloat32, 1);
  check_size(*row_weights, 0, num_rows);
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
  if (loss < 0 || loss >= kNumLossKinds || kl < 0 || kl > static_cast<int>(KlKind::kK3) ||
      (kind == LossKind::kGspo && !sequence_delta) ||
      (kind != LossKind::kCrossEntropy && advantages_obj.is_none()) ||
      (kl_kind != KlKind::kNone && reference_obj.is_none())) {
    throw std::invalid_argument("policy_loss: an argument that this loss needs is missing");
  }
  with_float(*logprobs, [&](auto zero) {
    using T = decltype(zero);
    constexpr DType kType = kDTypeOf<T>;
    PolicyLossInputs<T> in;
    in.rows = rows;
    in.mask = loss_mask;
    in.logprobs = logprobs->ptr<T>();
    in.anchor = optional_like<T>(anchor_obj, kOp, "old_logprobs", kType, *logprobs, &anchor);
    in.advantages =
        optional_like<T>(advantages_obj, kOp, "advantages", kType, *logprobs, &advantages);
    in.reference =
        optional_like<T>(reference_obj, kOp, "ref_logprobs", kType, *logprobs, &reference);
    in.token_weights =
        optional_like<T>(token_weights_obj, kOp, "token_weights", kType, *logprobs, &token_weights);
    in.selected =
        optional_like<uint8_t>(selected_obj, kOp, "selected", DType::kUInt8, *logprobs, &selected);
    in.sequence_delta = sequence_delta ? (*sequence_delta)->ptr<double>() : nullptr;
    in.row_weights = row_weights->ptr<float>();
    if (!grad_obj.is_none()) {
      grad.emplace(grad_obj, kOp, "grad");
      check_like(**grad, kType, *logprobs);
    }
    const LossParams<T> p = params_of<T>(params);
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

void delta_stats(py::handle a_obj, py::handle b_obj, py::handle mask_obj, py::handle cu_obj,
                 py::handle stats_obj, int num_threads) {
  constexpr char kOp[] = "off_policy_correction";
  Borrowed a(a_obj, kOp, "old_logprobs"), b(b_obj, kOp, "rollout_logprobs");
  Borrowed mask(mask_obj, kOp, "loss_mask"), stats(stats_obj, kOp, "stats");
  Optional cu;
  if (!cu_obj.is_none()) cu.emplace(cu_obj, kOp, "cu_seqlens");
  const RowLayout rows = layout_of(*a, cu);
  const LossMask loss_mask = mask_of(*mask, *a);
  check_cpu_array(*stats, DType::kFloat64, 2);
  check_size(*stats, 0, rows.num_rows);
  check_size(*stats, 1, kNumDeltaStats);
  with_float(*a, [&](auto zero) {
    using T = decltype(zero);
    check_like(*b, kDTypeOf<T>, *a);
    py::gil_scoped_release release;
    delta_stats_cpu<T>(a->ptr<T>(), b->ptr<T>(), loss_mask, rows, stats->ptr<double>(),
                       num_threads);
  });
}

void correct_tokens(py::handle a_obj, py::handle b_obj, py::handle mask_obj, py::handle cu_obj,
                    py::handle keep_obj, bool bounded, double ratio_low, double ratio_high,
                    double cap, py::handle new_mask_obj, py::handle weights_obj,
                    py::handle stats_obj, int num_threads) {
  constexpr char kOp[] = "off_policy_correction";
  Borrowed a(a_obj, kOp, "old_logprobs"), b(b_obj, kOp, "rollout_logprobs");
  Borrowed mask(mask_obj, kOp, "loss_mask"), stats(stats_obj, kOp, "stats");
  Borrowed keep(keep_obj, kOp, "keep_row"), new_mask(new_mask_obj, kOp, "new_mask");
  Optional cu, weights;
  if (!cu_obj.is_none()) cu.emplace(cu_obj, kOp, "cu_seqlens");
  const RowLayout rows = layout_of(*a, cu);
  const LossMask loss_mask = mask_of(*mask, *a);
  check_like(*new_mask, DType::kUInt8, *a);
  check_cpu_array(*keep, DType::kUInt8, 1);
  check_size(*keep, 0, rows.num_rows);
  check_cpu_array(*stats, DType::kFloat64, 2);
  check_size(*stats, 0, rows.num_rows);
  check_size(*stats, 1, kNumCorrectionStats);
  with_float(*a, [&](auto zero) {
    using T = decltype(zero);
    check_like(*b, kDTypeOf<T>, *a);
    TokenCorrection<T> correction;
    correction.keep_row = keep->ptr<uint8_t>();
    correction.bounded = bounded;
    correction.ratio_low = static_cast<T>(ratio_low);
    correction.ratio_high = static_cast<T>(ratio_high);
    correction.cap = static_cast<T>(cap);
    T* out = weights_obj.is_none() ? nullptr
                                   : const_cast<T*>(optional_like<T>(weights_obj, kOp, "weights",
                                                                     kDTypeOf<T>, *a, &weights));
    py::gil_scoped_release release;
    correct_tokens_cpu<T>(a->ptr<T>(), b->ptr<T>(), loss_mask, rows, correction,
                          new_mask->ptr<uint8_t>(), out, stats->ptr<double>(), num_threads);
  });
}

}  // namespace

void bind_policy_loss(py::module_& m) {
  m.def("policy_loss", &policy_loss);
  m.def("kl_penalty", &kl_penalty);
  m.def("mask_counts", &mask_counts);
  m.def("delta_stats", &delta_stats);
  m.def("correct_tokens", &correct_tokens);
}

}  // namespace skyrl_fast
