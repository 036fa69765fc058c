// selected_logprob and its gradient, and the SIMD level: checks, then the launchers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "bindings/borrow.h"
#include "bindings/ops.h"
#include "core/simd.h"
#include "logprob/logit_rows_bind.h"
#include "logprob/logprob.h"
#include "policy_loss/loss_params_bind.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "selected_logprob";
constexpr char kGatheredOp[] = "gathered_logprob";
constexpr char kLossOp[] = "masked_logprob_loss";
constexpr double kMaxTemperature = std::numeric_limits<double>::max();

LogitRows rows_of(const TensorView& t) {
  check_cpu(t);
  return logit_rows(t);
}

template <typename T>
T* per_row(const Borrowed& borrowed, DType dtype, int64_t num_rows) {
  check_cpu_array(*borrowed, dtype, 1);
  check_size(*borrowed, 0, num_rows);
  return borrowed->ptr<T>();
}

// An argument that may be None.
class MaybeBorrowed {
 public:
  MaybeBorrowed(py::handle object, const char* op, const char* name) {
    if (!object.is_none()) borrowed_.emplace(object, op, name);
  }
  template <typename T>
  T* per_row_or_null(DType dtype, int64_t num_rows) const {
    return borrowed_ ? per_row<T>(*borrowed_, dtype, num_rows) : nullptr;
  }

 private:
  std::optional<Borrowed> borrowed_;
};

// Kept ids and ranges, both None or neither.
class Kept {
 public:
  Kept(const char* op, py::handle ids_obj, py::handle ranges_obj) {
    if (ids_obj.is_none() != ranges_obj.is_none()) {
      throw std::invalid_argument(std::string(op) + ": expected kept_ids and kept_ranges together");
    }
    if (ids_obj.is_none()) return;
    ids_.emplace(ids_obj, op, "kept_ids");
    ranges_.emplace(ranges_obj, op, "kept_ranges");
  }
  KeptSets of_rows(int64_t num_rows) const {
    KeptSets kept;
    if (!ids_) return kept;
    check_cpu_array(**ids_, DType::kInt32, 1);
    check_cpu_array(**ranges_, DType::kInt64, 2);
    check_size(**ranges_, 0, num_rows);
    check_size(**ranges_, 1, 2);
    // Without ids a pointer may be null, which would mean the full vocabulary: no range has any.
    kept.num_ids = (*ids_)->shape[0];
    kept.ids = kept.num_ids > 0 ? (*ids_)->ptr<int32_t>() : nullptr;
    kept.ranges = (*ranges_)->ptr<int64_t>();
    return kept;
  }

 private:
  std::optional<Borrowed> ids_, ranges_;
};

void check_temperature(const char* op, double temperature) {
  if (temperature > 0.0 && temperature <= kMaxTemperature) return;
  throw std::invalid_argument(std::string(op) +
                              ": temperature: expected a positive and finite number, got " +
                              std::to_string(temperature));
}

// The arguments shared by forward and backward, borrowed and checked.
struct Inputs {
  Inputs(const char* op, py::handle logits_obj, py::handle targets_obj, py::handle mask_obj,
         py::handle kept_ids_obj, py::handle kept_ranges_obj, double temperature)
      : logits(logits_obj, op, "logits"),
        targets(targets_obj, op, "target_ids"),
        mask(mask_obj, op, "loss_mask"),
        kept(op, kept_ids_obj, kept_ranges_obj),
        rows(rows_of(*logits)) {
    selection.op = op;
    selection.target_ids = per_row<int64_t>(targets, DType::kInt64, rows.num_rows);
    selection.mask = mask.per_row_or_null<uint8_t>(DType::kUInt8, rows.num_rows);
    selection.kept = kept.of_rows(rows.num_rows);
    selection.temperature = temperature;
    check_temperature(op, temperature);
  }
  Borrowed logits, targets;
  MaybeBorrowed mask;
  Kept kept;
  LogitRows rows;
  Selection selection;
};

// Rows for the gradient: shape and dtype of the logits.
template <typename In>
LogitRows rows_like(const TensorView& grad, const In& in) {
  const LogitRows rows = rows_of(grad);
  check_dtype(grad, in.rows.dtype);
  if (rows.num_rows != in.rows.num_rows || rows.vocab != in.rows.vocab) {
    fail(grad, "shape " + in.logits->shape_string(), "shape " + grad.shape_string());
  }
  return rows;
}

void selected_logprob(py::handle logits, py::handle targets, py::handle mask, py::handle kept_ids,
                      py::handle kept_ranges, double temperature, py::handle logprob_obj,
                      py::handle lse_obj, py::handle entropy_obj, int num_threads) {
  const Inputs in(kOp, logits, targets, mask, kept_ids, kept_ranges, temperature);
  const Borrowed logprob(logprob_obj, kOp, "logprob");
  const Borrowed lse(lse_obj, kOp, "lse");
  const MaybeBorrowed entropy(entropy_obj, kOp, "entropy");
  const int64_t n = in.rows.num_rows;
  float* logprob_data = per_row<float>(logprob, DType::kFloat32, n);
  double* lse_data = per_row<double>(lse, DType::kFloat64, n);
  float* entropy_data = entropy.per_row_or_null<float>(DType::kFloat32, n);
  py::gil_scoped_release release;
  selected_logprob_cpu(in.rows, in.selection, logprob_data, lse_data, entropy_data, num_threads);
}

void selected_logprob_backward(py::handle logits, py::handle targets, py::handle mask,
                               py::handle kept_ids, py::handle kept_ranges, double temperature,
                               py::handle lse_obj, py::handle entropy_obj,
                               py::handle grad_logprob_obj, py::handle grad_entropy_obj,
                               py::handle grad_obj, int num_threads) {
  const Inputs in(kOp, logits, targets, mask, kept_ids, kept_ranges, temperature);
  const Borrowed grad(grad_obj, kOp, "grad");
  const LogitRows grad_rows = rows_like(*grad, in);
  const Borrowed lse(lse_obj, kOp, "lse");
  const MaybeBorrowed entropy(entropy_obj, kOp, "entropy");
  const MaybeBorrowed grad_logprob(grad_logprob_obj, kOp, "grad_logprob");
  const MaybeBorrowed grad_entropy(grad_entropy_obj, kOp, "grad_entropy");
  const int64_t n = in.rows.num_rows;
  const double* lse_data = per_row<double>(lse, DType::kFloat64, n);
  const float* entropy_data = entropy.per_row_or_null<float>(DType::kFloat32, n);
  const float* grad_logprob_data = grad_logprob.per_row_or_null<float>(DType::kFloat32, n);
  const float* grad_entropy_data = grad_entropy.per_row_or_null<float>(DType::kFloat32, n);
  if (grad_entropy_data != nullptr && entropy_data == nullptr) {
    throw std::invalid_argument(
        "selected_logprob: grad_entropy must come with entropy, got entropy=None");
  }
  py::gil_scoped_release release;
  selected_logprob_backward_cpu(in.rows, in.selection, lse_data, entropy_data, grad_logprob_data,
                                grad_entropy_data, grad_rows, num_threads);
}

// The same of several tokens per row.
struct GatheredInputs {
  GatheredInputs(py::handle logits_obj, py::handle targets_obj, py::handle mask_obj,
                 double temperature)
      : logits(logits_obj, kGatheredOp, "logits"),
        targets(targets_obj, kGatheredOp, "target_ids"),
        mask(mask_obj, kGatheredOp, "loss_mask"),
        rows(rows_of(*logits)) {
    check_cpu_array(*targets, DType::kInt64, 2);
    check_size(*targets, 0, rows.num_rows);
    check_temperature(kGatheredOp, temperature);
    ids.target_ids = targets->ptr<int64_t>();
    ids.per_row = targets->shape[1];
    ids.mask = mask.per_row_or_null<uint8_t>(DType::kUInt8, rows.num_rows);
    ids.temperature = temperature;
  }
  template <typename T>
  T* per_id(const Borrowed& borrowed, DType dtype) const {
    check_cpu_array(*borrowed, dtype, 2);
    check_size(*borrowed, 0, rows.num_rows);
    check_size(*borrowed, 1, ids.per_row);
    return borrowed->ptr<T>();
  }
  Borrowed logits, targets;
  MaybeBorrowed mask;
  LogitRows rows;
  GatheredIds ids;
};

void gathered_logprob(py::handle logits, py::handle targets, py::handle mask, double temperature,
                      py::handle logprob_obj, py::handle lse_obj, int num_threads) {
  const GatheredInputs in(logits, targets, mask, temperature);
  const Borrowed logprob(logprob_obj, kGatheredOp, "logprob");
  const Borrowed lse(lse_obj, kGatheredOp, "lse");
  float* logprob_data = in.per_id<float>(logprob, DType::kFloat32);
  double* lse_data = per_row<double>(lse, DType::kFloat64, in.rows.num_rows);
  py::gil_scoped_release release;
  gathered_logprob_cpu(in.rows, in.ids, logprob_data, lse_data, num_threads);
}

void gathered_logprob_backward(py::handle logits, py::handle targets, py::handle mask,
                               double temperature, py::handle lse_obj, py::handle grad_logprob_obj,
                               py::handle grad_obj, int num_threads) {
  const GatheredInputs in(logits, targets, mask, temperature);
  const Borrowed grad(grad_obj, kGatheredOp, "grad");
  const Borrowed lse(lse_obj, kGatheredOp, "lse");
  const Borrowed grad_logprob(grad_logprob_obj, kGatheredOp, "grad_logprob");
  const LogitRows grad_rows = rows_like(*grad, in);
  const double* lse_data = per_row<double>(lse, DType::kFloat64, in.rows.num_rows);
  const float* grad_logprob_data = in.per_id<float>(grad_logprob, DType::kFloat32);
  py::gil_scoped_release release;
  gathered_logprob_backward_cpu(in.rows, in.ids, lse_data, grad_logprob_data, grad_rows,
                                num_threads);
}

void masked_logprob_loss(py::handle logits, py::handle targets, py::handle mask,
                         py::handle kept_ids, py::handle kept_ranges, double temperature, int loss,
                         int kl, const std::vector<double>& params, py::handle old_logprobs_obj,
                         py::handle advantages_obj, py::handle reference_obj,
                         py::handle token_weights_obj, py::handle cross_entropy_weights_obj,
                         py::handle kl_weights_obj, py::handle weights_obj, py::handle logprob_obj,
                         py::handle entropy_obj, py::handle grad_obj, int num_threads) {
  const Inputs in(kLossOp, logits, targets, mask, kept_ids, kept_ranges, temperature);
  const int64_t n = in.rows.num_rows;
  const MaybeBorrowed old_logprobs(old_logprobs_obj, kLossOp, "old_logprobs");
  const MaybeBorrowed advantages(advantages_obj, kLossOp, "advantages");
  const MaybeBorrowed reference(reference_obj, kLossOp, "ref_logprobs");
  const MaybeBorrowed token_weights(token_weights_obj, kLossOp, "token_weights");
  const MaybeBorrowed cross_entropy_weights(cross_entropy_weights_obj, kLossOp,
                                            "cross_entropy_weights");
  const MaybeBorrowed kl_weights(kl_weights_obj, kLossOp, "kl_weights");
  const MaybeBorrowed entropy(entropy_obj, kLossOp, "entropy");
  const Borrowed weights(weights_obj, kLossOp, "row_weights");
  const Borrowed logprob(logprob_obj, kLossOp, "logprob");
  TokenLossInputs token;
  token.loss = static_cast<LossKind>(loss);
  token.kl = static_cast<KlKind>(kl);
  token.params = loss_params<float>(kLossOp, params);
  token.old_logprobs = old_logprobs.per_row_or_null<float>(DType::kFloat32, n);
  token.advantages = advantages.per_row_or_null<float>(DType::kFloat32, n);
  token.reference = reference.per_row_or_null<float>(DType::kFloat32, n);
  token.token_weights = token_weights.per_row_or_null<float>(DType::kFloat32, n);
  token.cross_entropy_weights = cross_entropy_weights.per_row_or_null<float>(DType::kFloat32, n);
  token.kl_weights = kl_weights.per_row_or_null<float>(DType::kFloat32, n);
  token.weights = per_row<float>(weights, DType::kFloat32, n);
  check_loss(kLossOp, loss, kl, !advantages_obj.is_none(), !reference_obj.is_none(), false);
  float* logprob_data = per_row<float>(logprob, DType::kFloat32, n);
  float* entropy_data = entropy.per_row_or_null<float>(DType::kFloat32, n);
  std::optional<Borrowed> grad;
  LogitRows grad_rows;
  if (!grad_obj.is_none()) {
    grad.emplace(grad_obj, kLossOp, "grad");
    grad_rows = rows_like(**grad, in);
  }
  py::gil_scoped_release release;
  masked_logprob_loss_cpu(in.rows, in.selection, token, logprob_data, entropy_data,
                          grad ? &grad_rows : nullptr, num_threads);
}

// For backends other than the native one.
void check_kept(const std::string& op, py::handle targets_obj, py::handle mask_obj,
                py::handle kept_ids, py::handle kept_ranges, int64_t vocab) {
  const Borrowed targets(targets_obj, op.c_str(), "target_ids");
  const MaybeBorrowed mask(mask_obj, op.c_str(), "loss_mask");
  const Kept kept(op.c_str(), kept_ids, kept_ranges);
  check_cpu_array(*targets, DType::kInt64, 1);
  const int64_t n = targets->shape[0];
  Selection selection;
  selection.op = op.c_str();
  selection.target_ids = targets->ptr<int64_t>();
  selection.mask = mask.per_row_or_null<uint8_t>(DType::kUInt8, n);
  selection.kept = kept.of_rows(n);
  py::gil_scoped_release release;
  check_kept_sets(selection, n, vocab);
}

}  // namespace

void bind_logprob(py::module_& m) {
  m.def("selected_logprob", &selected_logprob, py::arg("logits"), py::arg("target_ids"),
        py::arg("mask"), py::arg("kept_ids"), py::arg("kept_ranges"), py::arg("temperature"),
        py::arg("logprobs"), py::arg("lse"), py::arg("entropy"), py::arg("num_threads"));
  m.def("selected_logprob_backward", &selected_logprob_backward, py::arg("logits"),
        py::arg("target_ids"), py::arg("mask"), py::arg("kept_ids"), py::arg("kept_ranges"),
        py::arg("temperature"), py::arg("lse"), py::arg("entropy"), py::arg("grad_logprobs"),
        py::arg("grad_entropy"), py::arg("grad"), py::arg("num_threads"));
  m.def("gathered_logprob", &gathered_logprob, py::arg("logits"), py::arg("target_ids"),
        py::arg("mask"), py::arg("temperature"), py::arg("logprobs"), py::arg("lse"),
        py::arg("num_threads"));
  m.def("gathered_logprob_backward", &gathered_logprob_backward, py::arg("logits"),
        py::arg("target_ids"), py::arg("mask"), py::arg("temperature"), py::arg("lse"),
        py::arg("grad_logprobs"), py::arg("grad"), py::arg("num_threads"));
  m.def("masked_logprob_loss", &masked_logprob_loss, py::arg("logits"), py::arg("target_ids"),
        py::arg("mask"), py::arg("kept_ids"), py::arg("kept_ranges"), py::arg("temperature"),
        py::arg("loss"), py::arg("kl"), py::arg("params"), py::arg("old_logprobs"),
        py::arg("advantages"), py::arg("ref_logprobs"), py::arg("token_weights"),
        py::arg("cross_entropy_weights"), py::arg("kl_weights"), py::arg("row_weights"),
        py::arg("logprobs"), py::arg("entropy"), py::arg("grad"), py::arg("num_threads"));
  m.def("check_kept_sets", &check_kept, py::arg("op"), py::arg("target_ids"), py::arg("mask"),
        py::arg("kept_ids"), py::arg("kept_ranges"), py::arg("vocab"));
  m.def("set_simd_level", &set_simd_level, py::arg("name"));
  m.def("simd_level", [] { return simd_level_name(simd_level()); });
}

}  // namespace skyrl_fast
