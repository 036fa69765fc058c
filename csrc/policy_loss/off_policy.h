// Off-policy correction: weights and masks where the sampler's log-probabilities differ from the
// trainer's. Names: ratio = exp(clamp(old - rollout, -20, 20)) of a trained token.
#pragma once

#include <cstdint>

#include "policy_loss/policy_loss.h"  // LossMask, RowLayout

namespace skyrl_fast {

enum class TisKind : int { kNone = 0, kToken = 1, kSequence = 2 };
enum class SequenceMaskKind : int { kNone = 0, kGeometric = 1, kProduct = 2 };

// Applied in this order, each to the mask that the previous one left. Unused bounds are
// infinite; a NaN ratio is no outlier, and outside any token bounds.
struct OffPolicyRules {
  bool outliers = false;  // a token outside [outlier_low, outlier_high] drops its sequence
  double outlier_low = 0, outlier_high = 0;
  bool bounded = false;  // a token outside [token_low, token_high] is dropped
  double token_low = 0, token_high = 0;
  TisKind tis = TisKind::kNone;
  double cap = 0;  // of the token's ratio, or of the product over the sequence
  SequenceMaskKind sequence_mask = SequenceMaskKind::kNone;
  double mask_low = 0, mask_high = 0;  // of the product or geometric mean over the sequence

  bool masks() const { return outliers || bounded || sequence_mask != SequenceMaskKind::kNone; }
};

template <typename T>
struct OffPolicyInputs {
  RowLayout rows;
  LossMask mask;
  const T* old = nullptr;      // [cells]
  const T* rollout = nullptr;  // [cells]
  int64_t num_sequences = 0;
  // Sequence k holds the rows order[starts[k], starts[k + 1]); both null: each row is a sequence.
  // With null `order`, its rows are [starts[k], starts[k + 1]).
  const int64_t* starts = nullptr;
  const int64_t* order = nullptr;
};

// Means, spread and extremes are of all trained tokens; shares of sequences are of those that have
// a trained token; all are 0 where there are none.
enum OffPolicyMetric : int {
  kIsRatioMean,
  kIsRatioStd,
  kIsRatioMax,
  kIsRatioMin,
  kOutlierMasked,
  kOutlierOverHigh,
  kOutlierUnderLow,
  kTokenMasked,
  kTisTokenCapped,
  kTisSequenceCapped,
  kSequenceMasked,
  kSequenceOverHigh,
  kSequenceUnderLow,
  kNumOffPolicyMetrics,
};

// One pass over the cells; a second one, in the cache, where a rule needs the full sequence first.
// `new_mask` has the type of the given mask; null where no rule masks. `weights` [cells], 0 where
// the new mask is; null without TIS. Sums are float64 over fixed blocks of sequences: the same bits
// for any num_threads.
template <typename T>
void off_policy_correction_cpu(const OffPolicyRules& rules, const OffPolicyInputs<T>& in,
                               void* new_mask, T* weights, double* metrics, int num_threads);

}  // namespace skyrl_fast
