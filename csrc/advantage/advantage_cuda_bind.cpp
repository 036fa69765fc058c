// group_advantage on CUDA tensors: checks, launches.
#include <pybind11/pybind11.h>

#include "advantage/advantage_cuda.h"
#include "bindings/cuda_arguments.h"
#include "bindings/ops.h"

namespace skyrl_fast {
namespace {

constexpr char kAdvantageOp[] = "group_advantage";

// (N,), (N, R), or (A,) with offsets.
CellRows rows_of(const TensorView& t, const int32_t* cu, int64_t num_rows) {
  CellRows rows;
  rows.num_rows = num_rows;
  rows.cu = cu;
  if (cu == nullptr) {
    if (t.ndim != 1 && t.ndim != 2) fail(t, "(N,) or (N, R)", t.shape_string());
    check_size(t, 0, num_rows);
    rows.width = t.ndim == 2 ? t.shape[1] : 1;
  } else {
    check_ndim(t, 1);
  }
  return rows;
}

MaskDType mask_dtype(const TensorView& t) {
  switch (t.dtype) {
    case DType::kBool:
    case DType::kUInt8: return MaskDType::kUInt8;
    case DType::kInt64: return MaskDType::kInt64;
    case DType::kFloat32: return MaskDType::kFloat32;
    default: fail(t, "bool, uint8, int64 or float32", dtype_name(t.dtype));
  }
}

void group_advantage(py::handle rewards_obj, py::handle ids_obj, py::handle order_obj,
                     py::handle last_obj, py::handle mask_obj, py::handle cu_obj,
                     bool rewards_are_ragged, int estimator, py::handle scores_obj,
                     py::handle work_obj, py::handle out_obj, uintptr_t stream) {
  const Borrowed rewards(rewards_obj, kAdvantageOp, "rewards"),
      ids(ids_obj, kAdvantageOp, "group_ids");
  const Borrowed order(order_obj, kAdvantageOp, "order"),
      scores(scores_obj, kAdvantageOp, "scores");
  const Borrowed work(work_obj, kAdvantageOp, "row_advantage"), out(out_obj, kAdvantageOp, "out");
  check_cuda(*rewards);
  for (const Borrowed* t : {&rewards, &out}) {
    check_same_device(**t, *rewards);
    check_dtype(**t, DType::kFloat32);
    check_contiguous(**t);
  }
  check_ndim(*ids, 1);
  check_ndim(*scores, 1);
  const int64_t n = scores->shape[0];
  GroupAdvantageJob job;
  job.rewards = rewards->ptr<float>();
  job.num_sorted = ids->shape[0];
  job.sorted_ids = cuda_array<int64_t>(*ids, DType::kInt64, job.num_sorted, *rewards);
  job.order = cuda_array<int64_t>(*order, DType::kInt64, job.num_sorted, *rewards);
  job.scores = cuda_array<double>(*scores, DType::kFloat64, n, *rewards);
  job.row_advantage = cuda_array<float>(*work, DType::kFloat32, n, *rewards);
  job.out = out->ptr<float>();
  job.num_out = out->numel();
  job.estimator = static_cast<Estimator>(estimator);
  const MaybeOnCuda last(last_obj, kAdvantageOp, "is_last_step"),
      cu(cu_obj, kAdvantageOp, "cu_seqlens");
  job.is_last_step = last.array<uint8_t>(DType::kBool, n, *rewards);
  const int32_t* offsets = cu.array<int32_t>(DType::kInt32, n + 1, *rewards);
  job.reward_rows = rows_of(*rewards, rewards_are_ragged ? offsets : nullptr, n);
  job.out_rows = rows_of(*out, offsets, n);
  std::optional<Borrowed> mask;
  if (!mask_obj.is_none()) {
    mask.emplace(mask_obj, kAdvantageOp, "response_mask");
    check_same_device(**mask, *rewards);
    check_contiguous(**mask);
    if ((*mask)->shape_string() != out->shape_string()) {
      fail(**mask, "shape " + out->shape_string(), (*mask)->shape_string());
    }
    job.mask = (*mask)->data;
    job.mask_type = mask_dtype(**mask);
  }
  py::gil_scoped_release release;
  group_advantage_cuda(job, stream_of(stream));
}

}  // namespace

void bind_advantage_cuda(py::module_& m) {
  m.def("group_advantage_cuda", &group_advantage, py::arg("rewards"), py::arg("ids"),
        py::arg("order"), py::arg("last"), py::arg("mask"), py::arg("cu_seqlens"),
        py::arg("rewards_are_ragged"), py::arg("estimator"), py::arg("scores"), py::arg("work"),
        py::arg("out"), py::arg("stream"));
}

}  // namespace skyrl_fast
