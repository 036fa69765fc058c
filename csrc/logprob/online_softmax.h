// Softmax sums of a row seen in parts, in base 2: z = logit * log2(e) / temperature.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float_pair.h"
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

// Of the z seen so far: sum = sum of 2^(z - reference), weighted = sum of (z - reference) 2^(z -
// reference), where `reference` is the maximum.
struct SoftmaxPart {
  float max = -INFINITY;
  float sum = 0.0f;
  float weighted = 0.0f;
  // 0 while there are only -inf and NaN: -inf - -inf would be NaN.
  SKYRL_HD float reference() const { return max == -INFINITY ? 0.0f : max; }
};

// Makes `max`, which is not lower than the part's, its maximum. Without a branch: a part without
// logits has sum 0 and scale 0, and a difference of -inf must not make 0 * -inf.
template <bool kEntropy>
SKYRL_HD void raise_maximum(float max, SoftmaxPart* part) {
  SoftmaxPart raised;
  raised.max = max;
  const float down = part->max - raised.reference();
  const float scale = fast_exp2(down);
  raised.sum = scale * part->sum;
  if (kEntropy) {
    raised.weighted = scale * fmaf(larger(down, kMinExponent), part->sum, part->weighted);
  }
  *part = raised;
}

// Adds z = scale * x of one logit, which is not above the part's maximum.
template <bool kEntropy>
SKYRL_HD void accumulate(float x, float scale, SoftmaxPart* part) {
  const float y = fmaf(x, scale, -part->reference()), e = fast_exp2(y);
  part->sum += e;
  // A logit of -inf adds nothing; NaN stays in e.
  if (kEntropy) part->weighted = fmaf(larger(y, kMinExponent), e, part->weighted);
}

// A part's sums of logits in even and in odd places, whose maximum stays the same.
struct PairSums {
  FloatPair sum, weighted;

  SKYRL_HD explicit PairSums(const SoftmaxPart& part)
      : sum{part.sum, 0.0f}, weighted{part.weighted, 0.0f} {}

  // Adds two logits, which are not above the maximum `reference`.
  template <bool kEntropy>
  SKYRL_HD void accumulate(const FloatPair& x, float scale, float reference) {
    const FloatPair y = multiply_add(x, twice(scale), twice(-reference));
    const FloatPair e = {fast_exp2(y.first), fast_exp2(y.second)};
    sum = add(sum, e);
    if (!kEntropy) return;
    const FloatPair finite = {larger(y.first, kMinExponent), larger(y.second, kMinExponent)};
    weighted = multiply_add(finite, e, weighted);
  }

  template <bool kEntropy>
  SKYRL_HD void write_to(SoftmaxPart* part) const {
    part->sum = sum.first + sum.second;
    if (kEntropy) part->weighted = weighted.first + weighted.second;
  }
};

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

template <bool kEntropy>
SKYRL_HD float off_target_gradient(const GradTerms& t, float x, float scale) {
  const float y = fmaf(x, scale, -t.offset);
  const float e = fast_exp2(y);
  return e * (kEntropy ? fmaf(t.b, larger(y, kMinExponent), t.a) : t.a);  // NaN stays in e
}

// The same of two logits.
template <bool kEntropy>
SKYRL_HD FloatPair off_target_gradient(const GradTerms& t, const FloatPair& x, float scale) {
  const FloatPair y = multiply_add(x, twice(scale), twice(-t.offset));
  const FloatPair e = {fast_exp2(y.first), fast_exp2(y.second)};
  if (!kEntropy) return multiply(e, twice(t.a));
  const FloatPair finite = {larger(y.first, kMinExponent), larger(y.second, kMinExponent)};
  return multiply(e, multiply_add(twice(t.b), finite, twice(t.a)));
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
