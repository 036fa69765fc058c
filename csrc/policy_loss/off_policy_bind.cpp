// off_policy_correction: checks, then the launcher.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/ops.h"
#include "policy_loss/cells_bind.h"
#include "policy_loss/off_policy.h"

namespace skyrl_fast {
namespace {

constexpr char kOffPolicyOp[] = "off_policy_correction";

// outlier_low, outlier_high, token_low, token_high, cap, mask_low, mask_high
OffPolicyRules rules_of(bool outliers, bool bounded, int tis, int sequence_mask,
                        const std::vector<double>& numbers) {
  constexpr size_t kNumNumbers = 7;
  if (numbers.size() != kNumNumbers) {
    throw std::invalid_argument("off_policy_correction: bounds: expected 7 numbers, got " +
                                std::to_string(numbers.size()));
  }
  if (tis < 0 || tis > static_cast<int>(TisKind::kSequence) || sequence_mask < 0 ||
      sequence_mask > static_cast<int>(SequenceMaskKind::kProduct)) {
    throw std::invalid_argument("off_policy_correction: unknown code of tis or sequence_mask");
  }
  OffPolicyRules rules;
  rules.outliers = outliers;
  rules.outlier_low = numbers[0];
  rules.outlier_high = numbers[1];
  rules.bounded = bounded;
  rules.token_low = numbers[2];
  rules.token_high = numbers[3];
  rules.tis = static_cast<TisKind>(tis);
  rules.cap = numbers[4];
  rules.sequence_mask = static_cast<SequenceMaskKind>(sequence_mask);
  rules.mask_low = numbers[5];
  rules.mask_high = numbers[6];
  return rules;
}

// Non-decreasing offsets from 0 to `total`.
void check_starts(const TensorView& starts, int64_t total) {
  check_cpu_array(starts, DType::kInt64, 1);
  const int64_t n = starts.shape[0];
  const int64_t* p = starts.ptr<int64_t>();
  bool good = n > 0 && p[0] == 0 && p[n - 1] == total;
  for (int64_t i = 1; good && i < n; ++i) good = p[i] >= p[i - 1];
  if (!good) fail(starts, "offsets from 0 to " + std::to_string(total), "other offsets");
}

void check_order(const TensorView& order, int64_t num_rows) {
  check_cpu_array(order, DType::kInt64, 1);
  check_size(order, 0, num_rows);
  const int64_t* p = order.ptr<int64_t>();
  std::vector<bool> seen(static_cast<size_t>(num_rows), false);
  for (int64_t i = 0; i < num_rows; ++i) {
    if (p[i] < 0 || p[i] >= num_rows || seen[p[i]]) {
      fail(order, "a permutation of the rows", "row " + std::to_string(p[i]));
    }
    seen[p[i]] = true;
  }
}

void off_policy_correction(py::handle old_obj, py::handle rollout_obj, py::handle mask_obj,
                           py::handle cu_obj, py::handle starts_obj, py::handle order_obj,
                           bool outliers, bool bounded, int tis, int sequence_mask,
                           const std::vector<double>& numbers, py::handle new_mask_obj,
                           py::handle weights_obj, py::handle metrics_obj, int num_threads) {
  const OffPolicyRules rules = rules_of(outliers, bounded, tis, sequence_mask, numbers);
  Borrowed old(old_obj, kOffPolicyOp, "old_logprobs"),
      rollout(rollout_obj, kOffPolicyOp, "rollout_logprobs");
  Borrowed mask(mask_obj, kOffPolicyOp, "loss_mask"), metrics(metrics_obj, kOffPolicyOp, "metrics");
  Optional cu, starts, order, new_mask, weights;
  if (!cu_obj.is_none()) cu.emplace(cu_obj, kOffPolicyOp, "cu_seqlens");
  const RowLayout rows = layout_of(*old, cu);
  const LossMask loss_mask = mask_of(*mask, *old);
  check_cpu_array(*metrics, DType::kFloat64, 1);
  check_size(*metrics, 0, kNumOffPolicyMetrics);
  if (!starts_obj.is_none()) {
    starts.emplace(starts_obj, kOffPolicyOp, "starts");
    check_starts(**starts, rows.num_rows);
  }
  if (!order_obj.is_none()) {
    order.emplace(order_obj, kOffPolicyOp, "order");
    check_order(**order, rows.num_rows);
  }
  if (rules.masks() == new_mask_obj.is_none() ||
      (rules.tis != TisKind::kNone) == weights_obj.is_none()) {
    throw std::invalid_argument("off_policy_correction: an output that the rules need is missing");
  }
  if (!new_mask_obj.is_none()) {
    new_mask.emplace(new_mask_obj, kOffPolicyOp, "new_mask");
    check_like(**new_mask, (*mask).dtype, *old);
  }
  with_float(*old, [&](auto zero) {
    using T = decltype(zero);
    check_like(*rollout, kDTypeOf<T>, *old);
    OffPolicyInputs<T> in;
    in.rows = rows;
    in.mask = loss_mask;
    in.old = old->ptr<T>();
    in.rollout = rollout->ptr<T>();
    in.num_sequences = starts ? (*starts)->shape[0] - 1 : rows.num_rows;
    in.starts = starts ? (*starts)->template ptr<int64_t>() : nullptr;
    in.order = order ? (*order)->template ptr<int64_t>() : nullptr;
    T* out = const_cast<T*>(
        optional_like<T>(weights_obj, kOffPolicyOp, "weights", kDTypeOf<T>, *old, &weights));
    void* mask_out = new_mask ? (*new_mask)->data : nullptr;
    double* metrics_out = metrics->ptr<double>();
    py::gil_scoped_release release;
    off_policy_correction_cpu<T>(rules, in, mask_out, out, metrics_out, num_threads);
  });
}

}  // namespace

void bind_off_policy(py::module_& m) {
  m.def("off_policy_correction", &off_policy_correction, py::arg("old_logprobs"),
        py::arg("rollout_logprobs"), py::arg("mask"), py::arg("cu_seqlens"), py::arg("starts"),
        py::arg("order"), py::arg("outliers"), py::arg("bounded"), py::arg("tis"),
        py::arg("sequence_mask"), py::arg("numbers"), py::arg("new_mask"), py::arg("row_weights"),
        py::arg("metrics"), py::arg("num_threads"));
}

}  // namespace skyrl_fast
