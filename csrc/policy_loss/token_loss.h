// Policy losses and KL penalties of one token: value and derivative by the current logprob.
//
// The functions are branch-free on scalars, so that a CPU loop over them vectorises and a CUDA
// thread runs the same lines. Names: delta = logprob - old_logprob, where old_logprob is the
// denominator of the ratio (the old policy's or the sampler's); ratio = exp(clamp(delta, -20,
// 20)).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/tensor.h"

namespace skyrl_fast {

enum class LossKind : int {
  kRegular = 0,
  kDualClip = 1,
  kGspo = 2,
  kCispo = 3,
  kRolloutIs = 4,
  kClipCov = 5,
  kKlCov = 6,
  kSapo = 7,
  kDppoTv = 8,
  kDppoKl = 9,
  kCrossEntropy = 10,
  kImportanceSampling = 11,
};
constexpr int kNumLossKinds = 12;

enum class KlKind : int { kNone = 0, kK1 = 1, kAbs = 2, kK2 = 3, kK3 = 4 };

// Hyper-parameters under SkyRL's names; the defaults are SkyRL's.
template <typename T>
struct LossParams {
  T clip_low = T(0.8);    // 1 - eps_clip_low (cispo: 1 - cispo_eps_clip_low)
  T clip_high = T(1.2);   // 1 + eps_clip_high (cispo: 1 + cispo_eps_clip_high)
  T clip_ratio_c = T(3);  // dual_clip: bound of the loss where the advantage is negative
  T tau_pos = T(1), tau_neg = T(1.05);        // sapo
  T delta_low = T(0.2), delta_high = T(0.2);  // dppo
  T ppo_kl_coef = T(1);                       // kl_cov
  T kl_coef = T(0);  // weight of the KL penalty against the reference policy
};

template <typename T>
struct TokenLoss {
  T value = 0;                // loss of this token, not yet weighted
  T grad = 0;                 // d value / d logprob
  T ratio = 1;                // exp(delta), to the last bits however small
  T ratio_minus_1 = 0;        // exp(delta) - 1 without cancellation
  T delta = 0;                // clamped delta
  bool clipped_low = false;   // the lower bound took effect (dppo: a token of negative advantage)
  bool clipped_high = false;  // the upper bound took effect (dppo: of positive advantage)
  bool chosen = false;        // dual_clip: the bound c took effect; *_cov: the token was selected
};

template <typename T>
struct TokenKl {
  T value = 0;  // >= 0 for abs, k2, k3
  T grad = 0;   // d value / d logprob
};

constexpr double kMaxDelta = 20.0;  // |delta| at which a ratio's exponent is clamped
constexpr double kMaxK3 = 10.0;     // |k3| at which its value is clamped

// NaN stays NaN.
template <typename T>
SKYRL_HD T clamp_to(T x, T low, T high) {
  const T above = x < low ? low : x;
  return above > high ? high : above;
}
#if defined(__CUDA_ARCH__)
// Two instructions in place of four, which the compiler finds for constant bounds only.
__device__ __forceinline__ float clamp_to(float x, float low, float high) {
  float above, out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(above) : "f"(x), "f"(low));
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(above), "f"(high));
  return out;
}
#endif

template <typename T>
struct Exponential {
  T value;    // exp(x)
  T minus_1;  // exp(x) - 1
};

// Both to their own relative accuracy: exp(x) - 1 near 0, and exp(x) where it is small, which
// (exp(x) - 1) + 1 would round away; |x| <= 87. Vectorises: no table, no branch, no library call.
SKYRL_HD Exponential<float> exponential(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // exact products with n
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * (r * r) + r;  // exp(r) - 1
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 127u) << 23;  // 2^n: the low bits of `shifted` hold n
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return {scale * p + scale, scale * p + (scale - 1.0f)};
}
SKYRL_HD Exponential<double> exponential(double x) {
  const double minus_1 = ::expm1(x);
  return {x < -0.5 ? ::exp(x) : minus_1 + 1.0, minus_1};
}

// log(x) for normal x > 0; NaN for others. Vectorises likewise.
SKYRL_HD float log_positive(float x) {
#if defined(__CUDA_ARCH__)
  return x > 0.0f ? logf(x) : NAN;
#else
  constexpr uint32_t kSqrtHalfBits = 0x3f3504f3;
  constexpr float kLn2 = 0.693147182f;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  // x = 2^e * m with m in [sqrt(1/2), sqrt(2))
  const int32_t e = static_cast<int32_t>(bits - kSqrtHalfBits) >> 23;
  bits -= static_cast<uint32_t>(e) << 23;
  float m;
  std::memcpy(&m, &bits, sizeof(m));
  const float s = (m - 1.0f) / (m + 1.0f), z = s * s;
  const float p = ((((1.0f / 9) * z + 1.0f / 7) * z + 1.0f / 5) * z + 1.0f / 3) * z + 1.0f;
  const float log_x = static_cast<float>(e) * kLn2 + 2.0f * s * p;  // log m = 2 atanh(s)
  return x > 0.0f ? log_x : NAN;
#endif
}
SKYRL_HD double log_positive(double x) { return x > 0.0 ? ::log(x) : NAN; }

// Fills ratio - 1 and the clamped delta; returns the ratio. `slope` is d ratio / d logprob.
template <typename T>
SKYRL_HD T ratio_of(T delta, TokenLoss<T>* out, T* slope) {
  out->delta = clamp_to(delta, T(-kMaxDelta), T(kMaxDelta));
  const Exponential<T> exp_delta = exponential(out->delta);
  const T ratio = out->ratio = exp_delta.value;
  out->ratio_minus_1 = exp_delta.minus_1;
  const bool outside = (delta > T(kMaxDelta)) | (delta < T(-kMaxDelta));
  *slope = outside ? T(0) : ratio;  // NaN is not outside and stays NaN
  return ratio;
}

// PPO's pessimistic clip: -min(ratio * A, clamp(ratio) * A).
template <typename T>
SKYRL_HD void clipped_surrogate(const LossParams<T>& p, T ratio, T slope, T advantage,
                                TokenLoss<T>* out) {
  const T free = -advantage * ratio;
  const T bound = -advantage * clamp_to(ratio, p.clip_low, p.clip_high);
  const bool clipped = bound > free;
  out->clipped_low = clipped & (advantage < T(0));
  out->clipped_high = clipped & (advantage > T(0));
  out->value = clipped ? bound : free;
  out->grad = clipped ? T(0) : -advantage * slope;
}

// Loss of one token.
//   logprob          of the current policy
//   old_logprob      denominator of the ratio
//   delta            logprob - old_logprob; for gspo the mean of that over the token's sequence
//   selected         for clip_cov and kl_cov: the token is one of those picked by covariance
template <LossKind kKind, typename T>
SKYRL_HD TokenLoss<T> token_loss(const LossParams<T>& p, T logprob, T old_logprob, T delta,
                                 T advantage, bool selected) {
  TokenLoss<T> out;
  if (kKind == LossKind::kCrossEntropy) {
    out.value = -logprob;
    out.grad = T(-1);
    return out;
  }
  T slope;
  const T ratio = ratio_of(delta, &out, &slope);
  if (kKind == LossKind::kRegular || kKind == LossKind::kGspo) {
    clipped_surrogate(p, ratio, slope, advantage, &out);
  } else if (kKind == LossKind::kDualClip) {
    clipped_surrogate(p, ratio, slope, advantage, &out);
    const T ceiling = -advantage * p.clip_ratio_c;
    out.chosen = (advantage < T(0)) & (ceiling < out.value);
    out.value = out.chosen ? ceiling : out.value;
    out.grad = out.chosen ? T(0) : out.grad;
  } else if (kKind == LossKind::kClipCov) {
    clipped_surrogate(p, ratio, slope, advantage, &out);
    out.chosen = selected;
    out.value = selected ? T(0) : out.value;
    out.grad = selected ? T(0) : out.grad;
  } else if (kKind == LossKind::kKlCov) {
    const T raw = logprob - old_logprob;
    const T sign = raw > T(0) ? T(1) : (raw < T(0) ? T(-1) : T(0));
    const T coef = selected ? p.ppo_kl_coef : T(0);
    out.chosen = selected;
    out.value = -advantage * ratio + coef * (selected ? raw * sign : T(0));
    out.grad = -advantage * slope + coef * sign;
  } else if (kKind == LossKind::kCispo) {
    const T weight = clamp_to(ratio, p.clip_low, p.clip_high);
    out.clipped_low = ratio < p.clip_low;
    out.clipped_high = ratio > p.clip_high;
    out.value = -advantage * weight * logprob;
    out.grad = -advantage * weight;
  } else if (kKind == LossKind::kRolloutIs) {
    out.clipped_low = ratio <= p.clip_low;
    out.clipped_high = (ratio >= p.clip_high) & !out.clipped_low;  // once where the bounds meet
    const T weight = (out.clipped_low | out.clipped_high) ? T(0) : ratio;
    out.value = -advantage * weight * logprob;
    out.grad = -advantage * weight;
  } else if (kKind == LossKind::kSapo) {
    const T tau = advantage > T(0) ? p.tau_pos : p.tau_neg;
    // sigmoid(tau * (ratio - 1)); beyond +-80 it is 0 or 1 in every precision used here
    const T x = clamp_to(tau * out.ratio_minus_1, T(-80), T(80));
    const T odds = exponential(-x).value;  // against the gate
    const T gate = T(1) / (T(1) + odds);
    out.value = -advantage * gate * (T(4) / tau);
    out.grad = -advantage * T(4) * gate * (odds * gate) * slope;
  } else if (kKind == LossKind::kDppoTv || kKind == LossKind::kDppoKl) {
    const T prob = exponential(clamp_to(logprob, T(-80), T(20))).value;
    const T old_prob = exponential(clamp_to(old_logprob, T(-80), T(20))).value;
    bool far_high, far_low;
    if (kKind == LossKind::kDppoTv) {
      far_high = prob - old_prob > p.delta_high;
      far_low = old_prob - prob > p.delta_low;
    } else {
      constexpr T kEps = T(1e-8);
      const T kl =
          old_prob * (old_logprob - logprob) +
          (T(1) - old_prob) * log_positive((T(1) - old_prob + kEps) / (T(1) - prob + kEps));
      far_high = (prob > old_prob) & (kl > p.delta_high);
      far_low = (prob < old_prob) & (kl > p.delta_low);
    }
    out.clipped_high = (advantage > T(0)) & far_high;
    out.clipped_low = (advantage < T(0)) & far_low;
    const bool dropped = out.clipped_low | out.clipped_high;
    out.value = dropped ? T(0) : -advantage * ratio;
    out.grad = dropped ? T(0) : -advantage * slope;
  } else {  // kImportanceSampling
    out.value = -advantage * ratio;
    out.grad = -advantage * slope;
  }
  return out;
}

// For switches over all losses that call a template of the kind.
#define SKYRL_EACH_LOSS(CASE) \
  CASE(kRegular)              \
  CASE(kDualClip)             \
  CASE(kGspo)                 \
  CASE(kCispo)                \
  CASE(kRolloutIs)            \
  CASE(kClipCov)              \
  CASE(kKlCov)                \
  CASE(kSapo)                 \
  CASE(kDppoTv)               \
  CASE(kDppoKl)               \
  CASE(kCrossEntropy)         \
  CASE(kImportanceSampling)

// The same with the kind known only at run time.
template <typename T>
SKYRL_HD TokenLoss<T> token_loss(LossKind kind, const LossParams<T>& p, T logprob, T old_logprob,
                                 T delta, T advantage, bool selected) {
  switch (kind) {
#define SKYRL_LOSS_CASE(name) \
  case LossKind::name:        \
    return token_loss<LossKind::name, T>(p, logprob, old_logprob, delta, advantage, selected);
    SKYRL_EACH_LOSS(SKYRL_LOSS_CASE)
#undef SKYRL_LOSS_CASE
  }
  return TokenLoss<T>();
}

// Estimators of KL(current || reference) from one sample, http://joschu.net/blog/kl-approx.html
template <KlKind kKind, typename T>
SKYRL_HD TokenKl<T> token_kl(T logprob, T reference) {
  TokenKl<T> out;
  const T delta = logprob - reference;
  if (kKind == KlKind::kK1) {
    out.value = delta;
    out.grad = T(1);
  } else if (kKind == KlKind::kAbs) {
    out.grad = delta > T(0) ? T(1) : (delta < T(0) ? T(-1) : T(0));
    out.value = delta < T(0) ? -delta : delta;
  } else if (kKind == KlKind::kK2) {
    out.value = T(0.5) * delta * delta;
    out.grad = delta;
  } else if (kKind == KlKind::kK3) {
    const T x = clamp_to(-delta, T(-kMaxDelta), T(kMaxDelta));
    const T ratio_minus_1 = exponential(x).minus_1;
    const T raw = ratio_minus_1 - x;
    out.value = clamp_to(raw, T(-kMaxK3), T(kMaxK3));
    const bool inside = (x == -delta) & (out.value == raw);
    out.grad = inside ? -ratio_minus_1 : T(0);
    if (delta != delta) out.grad = delta;  // NaN in, NaN out
  }
  return out;
}

template <typename T>
SKYRL_HD TokenKl<T> token_kl(KlKind kind, T logprob, T reference) {
  switch (kind) {
    case KlKind::kK1: return token_kl<KlKind::kK1, T>(logprob, reference);
    case KlKind::kAbs: return token_kl<KlKind::kAbs, T>(logprob, reference);
    case KlKind::kK2: return token_kl<KlKind::kK2, T>(logprob, reference);
    case KlKind::kK3: return token_kl<KlKind::kK3, T>(logprob, reference);
    case KlKind::kNone: break;
  }
  return TokenKl<T>();
}

}  // namespace skyrl_fast
