// Credit for single turns and tokens: returns along a trajectory, and what they are compared with.
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
// not finite, the last row is no last step, or a trajectory lies in two groups.

// G_k = r_k + gamma G_(k+1).
void turn_level_returns_cpu(const Turns& turns, float* value_of_row, int num_threads);

// G_k minus the mean of what the other trajectories of the group have at turn k (0 where they are
// over already), or of their returns from the start; 0 in a group of one.
void turn_group_advantage_cpu(const Turns& turns, TurnBaseline baseline, bool scale_by_std,
                              float* value_of_row, int num_threads);

// The trajectory's sum of rewards against its group, plus step_weight times G_k against the rows
// of the group with the same anchor_ids, int64 [num_rows].
void gigpo_advantage_cpu(const Turns& turns, const int64_t* anchor_ids, double step_weight,
                         bool scale_by_std, float* value_of_row, int num_threads);

// What the chain over the trained tokens of a trajectory reads and writes.
template <typename Mask>
struct TokenChain {
  const char* op = "";
  const float* rewards = nullptr;
  RowLayout rewards_layout;
  bool rewards_per_row = false;           // one reward per row, after the row's last token
  const float* values = nullptr;          // [layout cells], or null: all 0
  const uint8_t* is_last_step = nullptr;  // [num_rows], or null: every row is a trajectory
  const Mask* mask = nullptr;             // [layout cells], not 0 = trained; null: all are
  RowLayout layout;
  double gamma = 1.0;
  double lambda = 1.0;
  float* advantages = nullptr;  // [layout cells]; 0 where the mask is
  float* returns = nullptr;     // [layout cells], or null: not wanted
};

constexpr double kMinVariance = 1e-8;  // of advantages that are normalised

// Generalised advantage estimation along the trained tokens of each trajectory: tokens that are
// not trained are skipped, and their rewards fall to the trained token before them. `normalize`
// then gives the advantages of all trained tokens mean 0 and variance 1.
// Throws invalid_argument where a reward, or the value of a trained token, is not finite, or the
// last row is no last step.
template <typename Mask>
void token_chain_cpu(const TokenChain<Mask>& chain, bool normalize, int num_threads);

}  // namespace skyrl_fast
