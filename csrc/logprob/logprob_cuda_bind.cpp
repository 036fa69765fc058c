// The log-probability ops on CUDA tensors: checks, launch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/cuda_arguments.h"
#include "bindings/ops.h"
#include "logprob/logit_rows_bind.h"
#include "logprob/logprob_cuda.h"
#include "policy_loss/loss_params_bind.h"

namespace skyrl_fast {
namespace {

constexpr char kLogprobOp[] = "selected_logprob";
constexpr char kLossOp[] = "masked_logprob_loss";

LogitRows rows_of(const TensorView& t) {
  check_cuda(t);
  return logit_rows(t);
}

// The arguments that all ops share, borrowed and checked.
struct Inputs {
  Inputs(const char* op, py::handle logits_obj, py::handle targets_obj, py::handle mask_obj,
         py::handle kept_ids_obj, py::handle kept_ranges_obj, double temperature)
      : logits(logits_obj, op, "logits"),
        targets(targets_obj, op, "target_ids"),
        mask(mask_obj, op, "mask"),
        rows(rows_of(*logits)) {
    selection.target_ids = cuda_array<int64_t>(*targets, DType::kInt64, rows.num_rows, *logits);
    selection.mask = mask.array<uint8_t>(DType::kUInt8, rows.num_rows, *logits);
    selection.op = op;
    if (kept_ids_obj.is_none() != kept_ranges_obj.is_none()) {
      throw std::invalid_argument(std::string(op) + ": expected kept_ids and kept_ranges together");
    }
    if (!kept_ids_obj.is_none()) {
      kept_ids.emplace(kept_ids_obj, op, "kept_ids");
      kept_ranges.emplace(kept_ranges_obj, op, "kept_ranges");
      selection.kept = kept();
    }
    selection.temperature = temperature;
    if (!(temperature > 0.0)) {
      throw std::invalid_argument(std::string(op) +
                                  ": temperature: expected a positive number, got " +
                                  std::to_string(temperature));
    }
  }
  KeptSets kept() const {
    KeptSets sets;
    const TensorView &ids = **kept_ids, &ranges = **kept_ranges;
    check_ndim(ids, 1);
    sets.num_ids = ids.shape[0];
    const int32_t* data = cuda_array<int32_t>(ids, DType::kInt32, sets.num_ids, *logits);
    sets.ids = sets.num_ids > 0 ? data : nullptr;
    check_same_device(ranges, *logits);
    check_dtype(ranges, DType::kInt64);
    check_ndim(ranges, 2);
    check_contiguous(ranges);
    check_size(ranges, 0, rows.num_rows);
    check_size(ranges, 1, 2);
    sets.ranges = ranges.ptr<int64_t>();
    return sets;
  }
  float* floats(const Borrowed& t) const {
    return cuda_array<float>(*t, DType::kFloat32, rows.num_rows, *logits);
  }
  float* floats(const MaybeOnCuda& t) const {
    return t.array<float>(DType::kFloat32, rows.num_rows, *logits);
  }
  double* doubles(const Borrowed& t) const {
    return cuda_array<double>(*t, DType::kFloat64, rows.num_rows, *logits);
  }
  Borrowed logits, targets;
  MaybeOnCuda mask;
  std::optional<Borrowed> kept_ids, kept_ranges;
  LogitRows rows;
  Selection selection;
};

// Rows for the gradient: shape, dtype and device of the logits.
LogitRows rows_like(const TensorView& grad, const Inputs& in) {
  const LogitRows rows = rows_of(grad);
  check_same_device(grad, *in.logits);
  check_dtype(grad, in.rows.dtype);
  if (rows.num_rows != in.rows.num_rows || rows.vocab != in.rows.vocab) {
    fail(grad, "shape " + in.logits->shape_string(), "shape " + grad.shape_string());
  }
  return rows;
}

void forward(py::handle logits, py::handle targets, py::handle mask, py::handle kept_ids,
             py::handle kept_ranges, double temperature, py::handle logprob_obj, py::handle lse_obj,
             py::handle entropy_obj, uintptr_t stream) {
  const Inputs in(kLogprobOp, logits, targets, mask, kept_ids, kept_ranges, temperature);
  const Borrowed logprob(logprob_obj, kLogprobOp, "logprob"), lse(lse_obj, kLogprobOp, "lse");
  const MaybeOnCuda entropy(entropy_obj, kLogprobOp, "entropy");
  float* logprob_data = in.floats(logprob);
  double* lse_data = in.doubles(lse);
  float* entropy_data = in.floats(entropy);
  py::gil_scoped_release release;
  selected_logprob_cuda(in.rows, in.selection, logprob_data, lse_data, entropy_data,
                        stream_of(stream));
}

void backward(py::handle logits, py::handle targets, py::handle mask, py::handle kept_ids,
              py::handle kept_ranges, double temperature, py::handle lse_obj,
              py::handle entropy_obj, py::handle grad_logprob_obj, py::handle grad_entropy_obj,
              py::handle grad_obj, uintptr_t stream) {
  const Inputs in(kLogprobOp, logits, targets, mask, kept_ids, kept_ranges, temperature);
  const Borrowed lse(lse_obj, kLogprobOp, "lse"), grad(grad_obj, kLogprobOp, "grad");
  const LogitRows grad_rows = rows_like(*grad, in);
  const MaybeOnCuda entropy(entropy_obj, kLogprobOp, "entropy");
  const MaybeOnCuda grad_logprob(grad_logprob_obj, kLogprobOp, "grad_logprob");
  const MaybeOnCuda grad_entropy(grad_entropy_obj, kLogprobOp, "grad_entropy");
  const double* lse_data = in.doubles(lse);
  const float* entropy_data = in.floats(entropy);
  const float* grad_logprob_data = in.floats(grad_logprob);
  const float* grad_entropy_data = in.floats(grad_entropy);
  if (grad_entropy && !entropy) {
    throw std::invalid_argument(
        "selected_logprob: grad_entropy must come with entropy, got entropy=None");
  }
  py::gil_scoped_release release;
  selected_logprob_backward_cuda(in.rows, in.selection, lse_data, entropy_data, grad_logprob_data,
                                 grad_entropy_data, grad_rows, stream_of(stream));
}

void masked_loss(py::handle logits, py::handle targets, py::handle mask, py::handle kept_ids,
                 py::handle kept_ranges, double temperature, int loss, int kl,
                 const std::vector<double>& params, py::handle old_logprobs_obj,
                 py::handle advantages_obj, py::handle reference_obj, py::handle token_weights_obj,
                 py::handle cross_entropy_weights_obj, py::handle kl_weights_obj,
                 py::handle weights_obj, py::handle logprob_obj, py::handle entropy_obj,
                 py::handle grad_obj, uintptr_t stream) {
  const Inputs in(kLossOp, logits, targets, mask, kept_ids, kept_ranges, temperature);
  const MaybeOnCuda old_logprobs(old_logprobs_obj, kLossOp, "old_logprobs");
  const MaybeOnCuda advantages(advantages_obj, kLossOp, "advantages");
  const MaybeOnCuda reference(reference_obj, kLossOp, "ref_logprobs");
  const MaybeOnCuda token_weights(token_weights_obj, kLossOp, "token_weights");
  const MaybeOnCuda cross_entropy_weights(cross_entropy_weights_obj, kLossOp,
                                          "cross_entropy_weights");
  const MaybeOnCuda kl_weights(kl_weights_obj, kLossOp, "kl_weights");
  const MaybeOnCuda entropy(entropy_obj, kLossOp, "entropy");
  const Borrowed weights(weights_obj, kLossOp, "row_weights");
  const Borrowed logprob(logprob_obj, kLossOp, "logprob");
  TokenLossInputs token;
  token.loss = static_cast<LossKind>(loss);
  token.kl = static_cast<KlKind>(kl);
  token.params = loss_params<float>(kLossOp, params);
  token.old_logprobs = in.floats(old_logprobs);
  token.advantages = in.floats(advantages);
  token.reference = in.floats(reference);
  token.token_weights = in.floats(token_weights);
  token.cross_entropy_weights = in.floats(cross_entropy_weights);
  token.kl_weights = in.floats(kl_weights);
  token.weights = in.floats(weights);
  check_loss(kLossOp, loss, kl, !advantages_obj.is_none(), !reference_obj.is_none(), false);
  float* logprob_data = in.floats(logprob);
  float* entropy_data = in.floats(entropy);
  std::optional<Borrowed> grad;
  LogitRows grad_rows;
  if (!grad_obj.is_none()) {
    grad.emplace(grad_obj, kLossOp, "grad");
    grad_rows = rows_like(**grad, in);
  }
  py::gil_scoped_release release;
  masked_logprob_loss_cuda(in.rows, in.selection, token, logprob_data, entropy_data,
                           grad ? &grad_rows : nullptr, stream_of(stream));
}

void scale_rows(py::handle rows_obj, py::handle factor_obj, uintptr_t stream) {
  const Borrowed rows(rows_obj, kLossOp, "grad"), factor(factor_obj, kLossOp, "grad_loss");
  const LogitRows logits = rows_of(*rows);
  const float* factor_data = cuda_array<float>(*factor, DType::kFloat32, 1, *rows);
  py::gil_scoped_release release;
  scale_rows_cuda(logits, factor_data, stream_of(stream));
}

// (vectors per thread, threads, blocks per cluster); vectors 0: rows are read twice.
py::tuple plan(int64_t vocab, int item_size, int major) {
  const VisitPlan p = plan_visit(vocab, item_size == 4 ? DType::kFloat32 : DType::kBFloat16, major);
  return py::make_tuple(p.vectors, p.threads, p.cluster);
}

}  // namespace

void bind_logprob_cuda(py::module_& m) {
  m.def("selected_logprob_cuda", &forward, py::arg("logits"), py::arg("target_ids"),
        py::arg("mask"), py::arg("kept_ids"), py::arg("kept_ranges"), py::arg("temperature"),
        py::arg("logprobs"), py::arg("lse"), py::arg("entropy"), py::arg("stream"));
  m.def("selected_logprob_backward_cuda", &backward, py::arg("logits"), py::arg("target_ids"),
        py::arg("mask"), py::arg("kept_ids"), py::arg("kept_ranges"), py::arg("temperature"),
        py::arg("lse"), py::arg("entropy"), py::arg("grad_logprobs"), py::arg("grad_entropy"),
        py::arg("grad"), py::arg("stream"));
  m.def("masked_logprob_loss_cuda", &masked_loss, py::arg("logits"), py::arg("target_ids"),
        py::arg("mask"), py::arg("kept_ids"), py::arg("kept_ranges"), py::arg("temperature"),
        py::arg("loss"), py::arg("kl"), py::arg("params"), py::arg("old_logprobs"),
        py::arg("advantages"), py::arg("ref_logprobs"), py::arg("token_weights"),
        py::arg("cross_entropy_weights"), py::arg("kl_weights"), py::arg("row_weights"),
        py::arg("logprobs"), py::arg("entropy"), py::arg("grad"), py::arg("stream"));
  m.def("scale_rows_cuda", &scale_rows, py::arg("rows"), py::arg("factor"), py::arg("stream"));
  m.def("plan_visit", &plan, py::arg("vocab"), py::arg("item_size"), py::arg("major"));
  m.def("visit_code_major", &visit_code_major);
}

}  // namespace skyrl_fast
