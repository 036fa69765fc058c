// Sums of a policy loss over trained tokens, and the metrics computed from them.
#pragma once

#include <cmath>

#include "policy_loss/policy_loss.h"

namespace skyrl_fast {

// Sums over some cells; over none: ratio_max 0, ratio_min infinity, the others 0.
struct LossSums {
  double policy = 0, kl_weighted = 0, tokens = 0, low = 0, high = 0, chosen = 0;
  double ratio_minus_1 = 0, approx_kl = 0, kl = 0;
  double policy_tokens = 0, kl_tokens = 0;
  double cross_entropy = 0, cross_entropy_weighted = 0, cross_entropy_tokens = 0;
  double ratio_max = 0, ratio_min = INFINITY;
};
constexpr int kNumLossSums = sizeof(LossSums) / sizeof(double);

SKYRL_HD void add(const LossSums& s, LossSums* total) {
  total->policy += s.policy;
  total->kl_weighted += s.kl_weighted;
  total->tokens += s.tokens;
  total->low += s.low;
  total->high += s.high;
  total->chosen += s.chosen;
  total->ratio_minus_1 += s.ratio_minus_1;
  total->approx_kl += s.approx_kl;
  total->kl += s.kl;
  total->policy_tokens += s.policy_tokens;
  total->kl_tokens += s.kl_tokens;
  total->cross_entropy += s.cross_entropy;
  total->cross_entropy_weighted += s.cross_entropy_weighted;
  total->cross_entropy_tokens += s.cross_entropy_tokens;
  total->ratio_max = s.ratio_max > total->ratio_max ? s.ratio_max : total->ratio_max;
  total->ratio_min = s.ratio_min < total->ratio_min ? s.ratio_min : total->ratio_min;
}

SKYRL_HD void write_metrics(const LossSums& s, LossKind loss, double kl_coef, double* metrics) {
  const bool any = s.policy_tokens > 0;
  const double count = any ? s.policy_tokens : 1.0;
  const double kl_count = s.kl_tokens > 0 ? s.kl_tokens : 1.0;
  const double supervised = s.cross_entropy_tokens > 0 ? s.cross_entropy_tokens : 1.0;
  const double clipped = loss == LossKind::kClipCov ? s.chosen : s.low + s.high;
  metrics[kPolicyLoss] = s.policy;
  metrics[kKlLoss] = s.kl_weighted;
  // without a penalty kl is 0, for any kl_coef
  metrics[kLoss] =
      s.policy + (s.kl_weighted != 0 ? kl_coef * s.kl_weighted : 0.0) + s.cross_entropy_weighted;
  metrics[kNumTokens] = s.tokens;
  metrics[kClipRatio] = clipped / count;
  metrics[kClippedLow] = s.low / count;
  metrics[kClippedHigh] = s.high / count;
  metrics[kChosen] = s.chosen / count;
  metrics[kRatioMean] = any ? 1.0 + s.ratio_minus_1 / count : 0.0;
  metrics[kRatioMax] = any ? s.ratio_max : 0.0;
  metrics[kRatioMin] = any ? s.ratio_min : 0.0;
  metrics[kApproxKl] = s.approx_kl / count;
  metrics[kKlMean] = s.kl / kl_count;
  metrics[kKlTokens] = s.kl_tokens;
  metrics[kPolicyTokens] = s.policy_tokens;
  metrics[kCrossEntropyLoss] = s.cross_entropy_weighted;
  metrics[kCrossEntropyMean] = s.cross_entropy / supervised;
  metrics[kCrossEntropyTokens] = s.cross_entropy_tokens;
}

}  // namespace skyrl_fast
