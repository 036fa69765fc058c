// Group-wise advantages of trajectories, broadcast to the rows (steps) they are made of.
#pragma once

#include <cstdint>

#include "row_layout.h"
#include "tensor.h"

namespace skyrl_fast {

enum class Estimator : int { kGrpo = 0, kDrGrpo = 1, kRloo = 2, kMaxRl = 3 };

constexpr double kAdvantageEpsilon = 1e-6;  // keeps a constant group finite

// The advantage of one score in its group of `count` scores; `std` is the unbiased deviation.
SKYRL_HD double advantage_of(Estimator estimator, double score, double mean, double std,
                             int64_t count) {
  switch (estimator) {
    case Estimator::kGrpo:
      return count == 1 ? score / (1.0 + kAdvantageEpsilon)
                        : (score - mean) / (std + kAdvantageEpsilon);
    case Estimator::kDrGrpo: return count == 1 ? score : score - mean;
    case Estimator::kRloo:
      return count == 1
                 ? 0.0
                 : (score - mean) * static_cast<double>(count) / static_cast<double>(count - 1);
    case Estimator::kMaxRl: return count == 1 ? score : (score - mean) / (mean + kAdvantageEpsilon);
  }
  return 0.0;
}

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
