// The hyper-parameters of masked_logprob_loss, as Python hands them over.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "token_loss.h"

namespace skyrl_fast {

// params: clip_low, clip_high, clip_ratio_c, tau_pos, tau_neg, delta_low, delta_high, kl_coef.
inline LossParams<float> loss_params(const std::vector<float>& p) {
  constexpr size_t kNumParams = 8;
  if (p.size() != kNumParams) {
    throw std::invalid_argument("masked_logprob_loss: params must be 8 numbers, got " +
                                std::to_string(p.size()));
  }
  LossParams<float> params;
  params.clip_low = p[0];
  params.clip_high = p[1];
  params.clip_ratio_c = p[2];
  params.tau_pos = p[3];
  params.tau_neg = p[4];
  params.delta_low = p[5];
  params.delta_high = p[6];
  params.kl_coef = p[7];
  return params;
}

}  // namespace skyrl_fast
