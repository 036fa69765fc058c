// Token-level advantages: GAE and REINFORCE++ along the trained tokens of a trajectory.
#pragma once

#include <cstdint>

#include "core/row_layout.h"
#include "core/tensor.h"

namespace skyrl_fast {

// Inputs and outputs of the chain over the trained tokens of a trajectory.
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
  float* returns = nullptr;     // [layout cells], or null: not computed
};

constexpr double kMinVariance = 1e-8;  // of normalised advantages

// Generalised advantage estimation along the trained tokens of each trajectory: tokens that are
// not trained are skipped, and their rewards are added to the trained token before them.
// `normalize` scales the advantages of all trained tokens to mean 0 and variance 1. Throws
// invalid_argument where a reward, or the value of a trained token, is not finite, or the last row
// is no last step.
template <typename Mask>
void token_chain_cpu(const TokenChain<Mask>& chain, bool normalize, int num_threads);

}  // namespace skyrl_fast
