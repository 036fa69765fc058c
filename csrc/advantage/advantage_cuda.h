// Group-wise advantages on a CUDA device: three launches, no synchronization.
#pragma once

#include <cstdint>

#include "advantage/estimator.h"
#include "core/cuda.h"

namespace skyrl_fast {

// Rows of cells: row i is [cu[i], cu[i + 1]), or [i * width, (i + 1) * width).
struct CellRows {
  int64_t num_rows = 0;
  int64_t width = 0;
  const int32_t* cu = nullptr;
  SKYRL_HD int64_t offset(int64_t row) const { return cu ? cu[row] : row * width; }
  SKYRL_HD int64_t length(int64_t row) const { return cu ? cu[row + 1] - cu[row] : width; }
};

enum class MaskDType : int { kNone = 0, kUInt8 = 1, kInt64 = 2, kFloat32 = 3 };

//   rewards        float [reward_rows cells]
//   sorted_ids     int64 [num_sorted]: the group of each last row, those of a group together; then,
//                  perhaps, the other rows, all with an id that no group has
//   order          int64 [num_sorted]: the row of each of these; ascending within a group
//   is_last_step   uint8 [num_rows], or null: every row is a trajectory
//   scores, row_advantage   double, float [num_rows]: work space
//   out            float [out_rows cells] = advantage of the row's trajectory * mask
// A score that is not finite makes its group's advantages NaN.
struct GroupAdvantageJob {
  const float* rewards = nullptr;
  CellRows reward_rows;
  int64_t num_sorted = 0;
  const int64_t* sorted_ids = nullptr;
  const int64_t* order = nullptr;
  const uint8_t* is_last_step = nullptr;
  const void* mask = nullptr;
  MaskDType mask_type = MaskDType::kNone;
  Estimator estimator = Estimator::kGrpo;
  CellRows out_rows;
  int64_t num_out = 0;  // cells of `out`
  double* scores = nullptr;
  float* row_advantage = nullptr;
  float* out = nullptr;
};

void group_advantage_cuda(const GroupAdvantageJob& job, cudaStream_t stream);

}  // namespace skyrl_fast
