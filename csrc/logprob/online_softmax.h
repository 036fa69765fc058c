// Softmax sums of a row seen in parts, in base 2: z = logit * log2(e) / temperature.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/tensor.h"
#if defined(SKYRL_FAST_EMULATE_CUDA)
#include "emulation/cuda_on_cpu.h"
#endif

namespace skyrl_fast {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.69314718055994531;
constexpr float kMinExponent = -126.0f;  // of normal floats; below it 2^y is 0

// 2^x; results below 2^-126 are 0. One instruction on the device, of up to two units in the last
// place of error.
SKYRL_HD float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#elif defined(SKYRL_FAST_EMULATE_CUDA)
  return emulation::rough_exp2(x);
#else
  return x < kMinExponent ? 0.0f : std::exp2(x);
#endif
}

// fmaxf, which drops NaN: the sums keep it.
SKYRL_HD float larger(float a, float b) { return fmaxf(a, b); }

// Of the z seen so far: sum = sum of 2^(z - max), weighted = sum of (z - max) 2^(z - max).
struct SoftmaxPart {
  float max = -INFINITY;
  float sum = 0.0f;
  float weighted = 0.0f;
};

// A part without logits, or with only -inf, must not produce 0 * -inf or inf - inf.
SKYRL_HD SoftmaxPart combine(const SoftmaxPart& a, const SoftmaxPart& b) {
  SoftmaxPart out;
  out.max = larger(a.max, b.max);
  if (out.max == -INFINITY) {
    out.sum = a.sum + b.sum;  // 0, or NaN
    return out;
  }
  const float down_a = a.max - out.max, down_b = b.max - out.max;
  const float scale_a = fast_exp2(down_a), scale_b = fast_exp2(down_b);
  out.sum = a.sum * scale_a + b.sum * scale_b;
  if (scale_a > 0.0f) out.weighted += scale_a * (a.weighted + down_a * a.sum);
  if (scale_b > 0.0f) out.weighted += scale_b * (b.weighted + down_b * b.sum);
  return out;
}

// Adds z = scale * x of kCount logits whose largest is `largest` (NaN apart).
template <bool kEntropy, int kCount>
SKYRL_HD void accumulate(const float (&x)[kCount], float largest, float scale, SoftmaxPart* part) {
  const float max = larger(part->max, largest * scale);
  if (max > part->max) {
    SoftmaxPart raised;
    raised.max = max;
    *part = combine(*part, raised);
  }
  if (max == -INFINITY) {  // only -inf and NaN so far
    for (int i = 0; i < kCount; ++i) part->sum += x[i] == -INFINITY ? 0.0f : x[i];
    return;
  }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 0; i < kCount; ++i) {
    const float y = fmaf(x[i], scale, -max), e = fast_exp2(y);
    part->sum += e;
    if (kEntropy) part->weighted += e > 0.0f ? y * e : 0.0f;
  }
}

// The results of a row's sums.
struct RowResult {
  double logprob;  // of the target; NaN where it is out of range
  double lse;      // log sum exp(logits / temperature)
  double entropy;  // in nats
};

// `target_logit` is NaN for a target out of range. Its product with the scale is exact, as in the
// fused multiply-add of the sums.
SKYRL_HD RowResult row_result(const SoftmaxPart& total, float target_logit, float scale) {
  const double log2_sum = log2(static_cast<double>(total.sum));
  const double target_z = static_cast<double>(target_logit) * static_cast<double>(scale);
  const double logprob = kLn2 * ((target_z - total.max) - log2_sum);
  const double entropy =
      kLn2 * (log2_sum - static_cast<double>(total.weighted) / static_cast<double>(total.sum));
  RowResult out;
  out.logprob = logprob > 0.0 ? 0.0 : logprob;  // rounding, where all mass is on the target
  out.lse = kLn2 * (total.max + log2_sum);
  out.entropy = entropy < 0.0 ? 0.0 : entropy;
  return out;
}

// d/dx of g logprob + h entropy is (g [x is target] - p (g + h (ln p + entropy))) / temperature.
// Off the target that is 2^y (a + b y) with y = scale * x - offset, where float offset falls short
// of lse / ln 2 by `low`, which a and b correct.
struct GradTerms {
  float offset = 0.0f, a = 0.0f, b = 0.0f;
  double lse = 0.0;
  float logprob_grad = 0.0f, entropy_grad = 0.0f, entropy = 0.0f;
  SKYRL_HD bool is_zero() const { return logprob_grad == 0.0f && entropy_grad == 0.0f; }
};

SKYRL_HD GradTerms grad_terms(double lse, float entropy, float logprob_grad, float entropy_grad,
                              float inv_temperature) {
  GradTerms t;
  const double offset = lse * kLog2E;
  t.offset = static_cast<float>(offset);
  const float low = static_cast<float>(offset - static_cast<double>(t.offset));
  const float ln2 = static_cast<float>(kLn2);
  // 2^-low, |low| < 2^-14 or so: exp2 of a tiny number by its series
  const float factor = (1.0f - low * ln2 * (1.0f - 0.5f * low * ln2)) * inv_temperature;
  t.a = -factor * (logprob_grad + entropy_grad * (entropy - ln2 * low));
  t.b = -factor * entropy_grad * ln2;
  t.lse = lse;
  t.logprob_grad = logprob_grad;
  t.entropy_grad = entropy_grad;
  t.entropy = entropy;
  return t;
}

SKYRL_HD float off_target_gradient(const GradTerms& t, float x, float scale) {
  const float y = fmaf(x, scale, -t.offset);
  const float e = fast_exp2(y);
  return e * fmaf(t.b, larger(y, kMinExponent), t.a);  // NaN stays in e
}

// 1 - p without cancellation where p is close to 1.
SKYRL_HD float target_gradient(const GradTerms& t, float x, float scale, float inv_temperature) {
  const float logprob =
      static_cast<float>(static_cast<double>(x) * static_cast<double>(scale) * kLn2 - t.lse);
  const float one_minus_p = -expm1f(logprob);
  const float p = 1.0f - one_minus_p;
  const float entropy_part = p > 0.0f ? p * (logprob + t.entropy) : 0.0f;
  return (t.logprob_grad * one_minus_p - t.entropy_grad * entropy_part) * inv_temperature;
}

}  // namespace skyrl_fast
