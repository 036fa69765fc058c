// The hyper-parameters of losses, as passed from Python.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "policy_loss/token_loss.h"

namespace skyrl_fast {

// values: clip_low, clip_high, clip_ratio_c, tau_pos, tau_neg, delta_low, delta_high, ppo_kl_coef,
// kl_coef.
template <typename T>
LossParams<T> loss_params(const char* op, const std::vector<double>& values) {
  constexpr size_t kNumParams = 9;
  if (values.size() != kNumParams) {
    throw std::invalid_argument(std::string(op) + ": params: expected 9 numbers, got " +
                                std::to_string(values.size()));
  }
  LossParams<T> p;
  T* const fields[kNumParams] = {&p.clip_low,   &p.clip_high,   &p.clip_ratio_c,
                                 &p.tau_pos,    &p.tau_neg,     &p.delta_low,
                                 &p.delta_high, &p.ppo_kl_coef, &p.kl_coef};
  for (size_t i = 0; i < kNumParams; ++i) *fields[i] = static_cast<T>(values[i]);
  return p;
}

// Refuses unknown codes of a loss or penalty, and a missing argument that these need.
inline void check_loss(const char* op, int loss, int kl, bool has_advantages, bool has_reference,
                       bool has_sequence_delta) {
  const bool is_known =
      loss >= 0 && loss < kNumLossKinds && kl >= 0 && kl <= static_cast<int>(KlKind::kK3);
  if (!is_known || (loss == static_cast<int>(LossKind::kGspo) && !has_sequence_delta) ||
      (loss != static_cast<int>(LossKind::kCrossEntropy) && !has_advantages) ||
      (kl != static_cast<int>(KlKind::kNone) && !has_reference)) {
    throw std::invalid_argument(std::string(op) + ": an argument that this loss needs is missing");
  }
}

}  // namespace skyrl_fast
