// Group-wise advantages of trajectories, broadcast to their rows (steps).
#pragma once

#include <cstdint>

#include "advantage/estimator.h"
#include "core/row_layout.h"

namespace skyrl_fast {

// Scores are the sums of last rows' rewards; row i of trajectory j receives A_j * mask[i, :].
//   rewards       float [rewards_layout cells]
//   group_ids     int64 [num_rows]; rows of a group need not be adjacent
//   is_last_step  uint8 [num_rows], or null: every row is a trajectory
//   mask          [out_layout cells] of Mask, or null: all ones
//   out           float [out_layout cells]
// Throws invalid_argument where a score is not finite, the last row is no last step, or the rows of
// one trajectory belong to two groups.
template <typename Mask>
void group_advantage_cpu(const float* rewards, const RowLayout& rewards_layout,
                         const int64_t* group_ids, const uint8_t* is_last_step, const Mask* mask,
                         Estimator estimator, const RowLayout& out_layout, float* out,
                         int num_threads);

}  // namespace skyrl_fast
