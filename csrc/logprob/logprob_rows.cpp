// One row of logits: log-probability, entropy, and their gradient. Compiled once per SIMD level.
//
// All exponentials are powers of two: with c = log2(e) / temperature, rounded to float, and z = x
// c, softmax(x / temperature) = 2^(z - max z) / sum 2^(z - max z). The exponents are relative to
// the largest logit so far; the sums are rescaled when a larger one is found, which is rare.
#include "logprob/logprob_rows.h"

#include <math.h>

#include "core/simd_vectors.h"

namespace skyrl_fast {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;
constexpr int64_t kPairs = 2 * kLanes;            // elements in two vectors
constexpr int64_t kGroup = kGroupPairs * kPairs;  // elements processed together
constexpr int64_t kGroupsPerFlush = 64;           // float sums this long stay accurate enough
constexpr int64_t kPrefetchBytes = 8192,
                  kLine = 64;  // a shorter distance is up to 30 % slower on some CPUs

// What exponents are relative to.
struct Reference {
  float max;  // largest logit seen; -inf before the first
  Vec max_lanes;
  Vec origin;     // with fma: minus the offset; without: the logit whose z is the offset
  double offset;  // z that is subtracted
};

SKYRL_INLINE Reference reference_at(float max, float logit, float c) {
  const float rounded = logit * c;
  Reference r;
  r.max = max;
  r.max_lanes = set1(max);
  r.origin = set1(kHasFma ? -rounded : logit);
  r.offset = kHasFma ? static_cast<double>(rounded) : static_cast<double>(logit) * c;
  return r;
}

// Before the first logit: every exponent relative to it is +inf or NaN.
SKYRL_INLINE Reference no_reference() {
  Reference r;
  r.max = -INFINITY;
  r.max_lanes = set1(-INFINITY);
  r.origin = set1(kHasFma ? INFINITY : -INFINITY);
  r.offset = 0.0;
  return r;
}

// x c - offset
SKYRL_INLINE Vec exponent(Vec x, Vec c, const Reference& r) {
  return kHasFma ? fma(x, c, r.origin) : mul(add(x, mul(set1(-1.0f), r.origin)), c);
}

struct Sums {
  double exps = 0.0;      // sum 2^y
  double products = 0.0;  // sum 2^y y
};

struct LaneSums {
  Vec exps[2] = {set1(0.0f), set1(0.0f)};
  Vec products[2] = {set1(0.0f), set1(0.0f)};
};

// Adds the terms of two vectors of exponents from kMinExponent to 1.
template <bool kEntropy>
SKYRL_INLINE void accumulate(Vec y0, Vec y1, LaneSums* lanes) {
  const Vec y[2] = {y0, y1};
  Vec e[2];
  exp2_normal2<5>(y0, y1, &e[0], &e[1]);
  for (int k = 0; k < 2; ++k) {
    lanes->exps[k] = add(lanes->exps[k], e[k]);
    if (kEntropy) lanes->products[k] = fma(e[k], y[k], lanes->products[k]);
  }
}

template <bool kEntropy>
SKYRL_INLINE void flush(LaneSums* lanes, Sums* sums) {
  sums->exps += sum_lanes(add(lanes->exps[0], lanes->exps[1]));
  if (kEntropy) sums->products += sum_lanes(add(lanes->products[0], lanes->products[1]));
  *lanes = LaneSums();
}

// Makes a larger logit the reference and rescales the sums to it.
SKYRL_INLINE Reference raised(Vec candidates, float c, const Reference& r, Sums* sums) {
  float lane[kLanes];
  store_lanes(lane, candidates);
  float largest = r.max;
  for (int i = 0; i < kLanes; ++i) {
    if (lane[i] > largest) largest = lane[i];
  }
  const Reference raised = reference_at(largest, largest, c);
  const double shift = r.offset - raised.offset;
  const double factor = r.max == -INFINITY ? 0.0 : exp2(shift);
  sums->products = factor * (sums->products + shift * sums->exps);
  sums->exps *= factor;
  return raised;
}

// Adds a group's terms for any logits: makes one that is larger than all before the reference, and
// clamps exponents to the smallest normal one.
template <bool kEntropy, int kNumPairs, typename T>
__attribute__((noinline)) static void visit_any(const T* p, float c, Reference* r, LaneSums* lanes,
                                                Sums* sums) {
  Vec x[2 * kNumPairs];
  for (int k = 0; k < kNumPairs; ++k) load2(p + k * kPairs, &x[2 * k], &x[2 * k + 1]);
  Vec largest = max(x[0], x[1]);
  for (int k = 1; k < kNumPairs; ++k) largest = max(largest, max(x[2 * k], x[2 * k + 1]));
  if (any_greater(largest, r->max_lanes)) {
    flush<kEntropy>(lanes, sums);
    *r = raised(largest, c, *r, sums);
  }
  const Reference against = r->max == -INFINITY ? reference_at(-INFINITY, 0.0f, c) : *r;
  const Vec least = set1(kMinExponent);
  for (int k = 0; k < kNumPairs; ++k) {
    accumulate<kEntropy>(max(least, exponent(x[2 * k], set1(c), against)),
                         max(least, exponent(x[2 * k + 1], set1(c), against)), lanes);
  }
}

// Adds a group's terms. Nearly always all exponents are from kMinExponent to -0, which one
// comparison checks.
template <bool kEntropy, int kNumPairs, typename T>
SKYRL_INLINE void visit(const T* p, float c, Reference* r, LaneSums* lanes, Sums* sums) {
  Vec y[2 * kNumPairs];
  for (int k = 0; k < kNumPairs; ++k) {
    load2(p + k * kPairs, &y[2 * k], &y[2 * k + 1]);
    y[2 * k] = exponent(y[2 * k], set1(c), *r);
    y[2 * k + 1] = exponent(y[2 * k + 1], set1(c), *r);
  }
  BitVec extreme = max_bits(bits(y[0]), bits(y[1]));
  for (int k = 1; k < kNumPairs; ++k) {
    extreme = max_bits(extreme, max_bits(bits(y[2 * k]), bits(y[2 * k + 1])));
  }
  if (__builtin_expect(any_outside(extreme), 0)) {
    // Copies: a variable whose address is taken leaves the registers, in the loop too.
    Reference reference = *r;
    LaneSums lane_sums = *lanes;
    Sums so_far = *sums;
    visit_any<kEntropy, kNumPairs>(p, c, &reference, &lane_sums, &so_far);
    *r = reference;
    *lanes = lane_sums;
    *sums = so_far;
    return;
  }
  for (int k = 0; k < kNumPairs; ++k) accumulate<kEntropy>(y[2 * k], y[2 * k + 1], lanes);
}

template <typename T>
SKYRL_INLINE void prefetch_group(const T* p) {
  const char* ahead = reinterpret_cast<const char*>(p) + kPrefetchBytes;
  for (int64_t b = 0; b < static_cast<int64_t>(kGroup * sizeof(T)); b += kLine) {
    __builtin_prefetch(ahead + b, 0, 2);  // into L2: few requests to L1 can be outstanding
  }
}

template <bool kEntropy, typename T>
SKYRL_INLINE void forward_row(const T* row, int64_t vocab, int64_t target, double temperature,
                              RowStats* stats) {
  const float c = static_cast<float>(kLog2E / temperature);
  Reference r = no_reference();
  LaneSums lanes;
  Sums sums;
  int64_t i = 0;
  while (i + kGroup <= vocab) {
    const int64_t groups = (vocab - i) / kGroup;
    const int64_t end = i + kGroup * (groups < kGroupsPerFlush ? groups : kGroupsPerFlush);
    for (; i < end; i += kGroup) {
      prefetch_group(row + i);
      visit<kEntropy, kGroupPairs>(row + i, c, &r, &lanes, &sums);
    }
    flush<kEntropy>(&lanes, &sums);
  }
  for (; i + kPairs <= vocab; i += kPairs) visit<kEntropy, 1>(row + i, c, &r, &lanes, &sums);
  if (i < vocab) {
    T rest[kPairs];
    for (int64_t k = 0; k < kPairs; ++k) from_float(-INFINITY, &rest[k]);
    memcpy(rest, row + i, (vocab - i) * sizeof(T));
    visit<kEntropy, 1>(rest, c, &r, &lanes, &sums);
  }
  flush<kEntropy>(&lanes, &sums);

  const double log2_sum = r.max == -INFINITY ? NAN : log2(sums.exps);
  const double target_z = static_cast<double>(to_float(row[target])) * c;
  const double logprob = kLn2 * (target_z - r.offset - log2_sum);
  const double entropy = kEntropy ? kLn2 * (log2_sum - sums.products / sums.exps) : 0.0;
  stats->logprob = logprob > 0.0 ? 0.0 : logprob;  // rounding, where all mass is on the target
  stats->lse = kLn2 * (r.offset + log2_sum);
  stats->entropy = entropy < 0.0 ? 0.0 : entropy;
}

// d/dx of g logprob + h entropy is (g [x is target] - p (g + h (ln p + entropy))) / temperature.
// Off the target that is 2^y (a + b y), with p = 2^(y - low) and y = z - offset.
struct GradTerms {
  Reference reference;
  float a, b;
  float at_target;
};

SKYRL_INLINE GradTerms grad_terms(float c, float target_logit, double temperature,
                                  const RowStats& stats, const RowGrads& grads) {
  GradTerms t;
  const double log2_sum = stats.lse * kLog2E;
  t.reference = reference_at(0.0f, static_cast<float>(log2_sum / c), c);
  const double low = log2_sum - t.reference.offset;
  const double scale = exp2(-low) / temperature;
  t.a = static_cast<float>(-scale * (grads.logprob + grads.entropy * (stats.entropy - kLn2 * low)));
  t.b = static_cast<float>(-scale * grads.entropy * kLn2);
  const double logprob = static_cast<double>(target_logit) * c * kLn2 - stats.lse;
  const double p = exp(logprob);
  const double entropy_part = p > 0.0 ? p * (logprob + stats.entropy) : 0.0;
  t.at_target = static_cast<float>(
      (grads.logprob * -expm1(logprob) - grads.entropy * entropy_part) / temperature);
  return t;
}

// A gradient is rounded to its dtype: errors of 2^-9 (bfloat16) and 2^-12 (float16) are larger than
// the shorter polynomials' 1e-4 and 3e-6.
constexpr int exp2_degree(const float*) { return 5; }
constexpr int exp2_degree(const Float16*) { return 4; }
constexpr int exp2_degree(const BFloat16*) { return 3; }

template <bool kEntropy, int kDegree>
SKYRL_INLINE Vec gradient(Vec x, Vec c, const GradTerms& t) {
  const Vec y = exponent(x, c, t.reference);
  const Vec e = exp2_or_zero<kDegree>(y);
  if (!kEntropy) return mul(e, set1(t.a));
  return mul(e, fma(set1(t.b), max(set1(kMinExponent), y), set1(t.a)));
}

template <bool kEntropy, typename T>
SKYRL_INLINE void differentiate(const T* p, Vec c, const GradTerms& t, T* grad) {
  Vec a, b;
  load2(p, &a, &b);
  constexpr int kDegree = exp2_degree(static_cast<const T*>(nullptr));
  store2(grad, gradient<kEntropy, kDegree>(a, c, t), gradient<kEntropy, kDegree>(b, c, t));
}

template <bool kEntropy, typename T>
SKYRL_INLINE void backward_row(const T* row, int64_t vocab, int64_t target, double temperature,
                               const RowStats& stats, const RowGrads& grads, T* grad) {
  const float c = static_cast<float>(kLog2E / temperature);
  const Vec c_lanes = set1(c);
  const float target_logit = target < 0 ? 0.0f : to_float(row[target]);
  const GradTerms t = grad_terms(c, target_logit, temperature, stats, grads);
  int64_t i = 0;
  for (; i + kGroup <= vocab; i += kGroup) {
    prefetch_group(row + i);
    for (int k = 0; k < kGroupPairs; ++k) {
      differentiate<kEntropy>(row + i + k * kPairs, c_lanes, t, grad + i + k * kPairs);
    }
  }
  for (; i + kPairs <= vocab; i += kPairs) differentiate<kEntropy>(row + i, c_lanes, t, grad + i);
  if (i < vocab) {
    T rest[kPairs] = {};
    memcpy(rest, row + i, (vocab - i) * sizeof(T));
    differentiate<kEntropy>(rest, c_lanes, t, rest);
    memcpy(grad + i, rest, (vocab - i) * sizeof(T));
  }
  if (target >= 0) from_float(t.at_target, grad + target);
}

template <typename T>
void forward(const void* row, int64_t vocab, int64_t target, double temperature, bool with_entropy,
             RowStats* stats) {
  const T* p = static_cast<const T*>(row);
  if (with_entropy) {
    forward_row<true>(p, vocab, target, temperature, stats);
  } else {
    forward_row<false>(p, vocab, target, temperature, stats);
  }
}

template <typename T>
void backward(const void* row, int64_t vocab, int64_t target, double temperature,
              const RowStats& stats, const RowGrads& grads, void* grad) {
  const T* p = static_cast<const T*>(row);
  T* out = static_cast<T*>(grad);
  if (grads.entropy != 0.0) {
    backward_row<true>(p, vocab, target, temperature, stats, grads, out);
  } else {
    backward_row<false>(p, vocab, target, temperature, stats, grads, out);
  }
}

const RowKernelSet kKernels = {{forward<float>, backward<float>},
                               {forward<BFloat16>, backward<BFloat16>},
                               {forward<Float16>, backward<Float16>}};

}  // namespace

#if defined(SKYRL_SIMD_AVX512)
const RowKernelSet& logprob_rows_avx512() { return kKernels; }
#elif defined(SKYRL_SIMD_AVX2)
const RowKernelSet& logprob_rows_avx2() { return kKernels; }
#else
const RowKernelSet& logprob_rows_baseline() { return kKernels; }
#endif

}  // namespace skyrl_fast
