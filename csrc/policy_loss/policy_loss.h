// Policy losses and KL penalties of cells: inputs and outputs of the launchers.
#pragma once

#include <cstdint>

#include "core/row_layout.h"
#include "policy_loss/token_loss.h"

namespace skyrl_fast {

enum class MaskType : int { kUInt8 = 0, kInt64 = 1, kFloat32 = 2 };

// A token is trained where its mask is not 0. Where it is 0, no value matters: it may be NaN.
struct LossMask {
  const void* data = nullptr;
  MaskType type = MaskType::kUInt8;
};

// Arrays are dense and hold the cells of `rows`.
template <typename T>
struct PolicyLossInputs {
  RowLayout rows;
  LossMask mask;
  const T* logprobs = nullptr;
  const T* old_logprobs = nullptr;  // null: the logprobs themselves (ratio 1)
  const T* advantages = nullptr;    // null only for kCrossEntropy
  const T* reference = nullptr;     // for the KL penalty; null without
  // The weights of the streams: policy loss, -logprob and KL penalty. 0 drops a token from a
  // stream, even where its value is NaN.
  const T* token_weights = nullptr;          // null: ones
  const T* cross_entropy_weights = nullptr;  // null: zeros. Where given, tokens of token weight 0
                                             // do not count in the metrics of the policy loss
  const T* kl_weights = nullptr;             // null: ones
  const uint8_t* selected = nullptr;         // for kClipCov and kKlCov
  const double* sequence_delta = nullptr;    // [num_rows], for kGspo
  const T* row_weights = nullptr;            // [num_rows]
};

// Entries of `metrics`; means and fractions are over the tokens of their stream.
enum PolicyLossMetric : int {
  kLoss,        // policy loss + kl_coef * KL + cross-entropy, weighted by row
  kPolicyLoss,  // the first part
  kKlLoss,      // weighted KL, before kl_coef
  kNumTokens,   // trained tokens
  kClipRatio,   // fractions: of clipped tokens (clip_cov: of selected ones)
  kClippedLow,
  kClippedHigh,
  kChosen,
  kRatioMean,
  kRatioMax,
  kRatioMin,
  kApproxKl,  // mean of (ratio - 1 - delta), Schulman's estimate of KL(old || current)
  kKlMean,    // mean of the KL penalty's estimate
  kKlTokens,
  kPolicyTokens,
  kCrossEntropyLoss,  // weighted
  kCrossEntropyMean,
  kCrossEntropyTokens,
  kNumPolicyLossMetrics,
};

// Loss and d loss / d logprobs in one pass. `grad` [cells] may be null. Sums are float64 over fixed
// blocks in element order: the same bits for any num_threads.
template <typename T>
void policy_loss_cpu(LossKind loss, KlKind kl, const LossParams<T>& params,
                     const PolicyLossInputs<T>& in, T* grad, double* metrics, int num_threads);

// Per-token KL penalty, 0 where masked. With `grad_out` the result is grad_out * d kl / d logprob.
template <typename T>
void kl_penalty_cpu(KlKind kl, const T* logprobs, const T* reference, const LossMask& mask,
                    const T* grad_out, int64_t num_cells, T* out, int num_threads);

// Trained tokens of each row.
void mask_counts_cpu(const LossMask& mask, const RowLayout& rows, int64_t* counts, int num_threads);

// sums [num_rows, 2]: of each row's trained tokens the sum of a - b, and how many they are.
template <typename T>
void delta_sums_cpu(const T* a, const T* b, const LossMask& mask, const RowLayout& rows,
                    double* sums, int num_threads);

}  // namespace skyrl_fast
