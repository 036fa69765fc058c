// Turn-level advantages: the returns of a trajectory's turns, and their baselines.
#pragma once

#include <cstdint>

#include "core/row_layout.h"
#include "core/tensor.h"

namespace skyrl_fast {

// The rows of a batch: a trajectory's rows are adjacent and in time order.
struct Turns {
  const char* op = "";             // for messages
  const float* rewards = nullptr;  // [layout cells]; a row's reward is their sum
  RowLayout layout;
  const int64_t* group_ids = nullptr;     // [num_rows], or null where groups do not matter
  const uint8_t* is_last_step = nullptr;  // [num_rows], or null: every row is a trajectory
  double gamma = 1.0;                     // discount of one turn
};

enum class TurnBaseline : int { kTurn = 0, kEpisode = 1 };

// Each writes one value per row, float [num_rows], and throws invalid_argument where rewards are
// not finite, the last row is no last step, or a trajectory belongs to two groups.

// G_k = r_k + gamma G_(k+1).
void turn_level_returns_cpu(const Turns& turns, float* row_values, int num_threads);

// G_k minus the mean over the other trajectories of the group: of their returns at turn k (0 where
// they have ended), or of their returns from the start; 0 in a group of one.
void turn_group_advantage_cpu(const Turns& turns, TurnBaseline baseline, bool scale_by_std,
                              float* row_values, int num_threads);

// The advantage of the trajectory's sum of rewards in its group, plus step_weight times that of G_k
// among the group's rows with the same anchor_ids, int64 [num_rows].
void gigpo_advantage_cpu(const Turns& turns, const int64_t* anchor_ids, double step_weight,
                         bool scale_by_std, float* row_values, int num_threads);

}  // namespace skyrl_fast
