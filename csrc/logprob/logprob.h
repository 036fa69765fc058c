// Log-probability (and entropy) of one selected token per row of logits, and the gradient.
#pragma once

#include <cstdint>

#include "logprob/kept_sets.h"
#include "policy_loss/token_loss.h"

namespace skyrl_fast {

// Rows of `vocab` adjacent elements: row r starts at element
// (r / inner_rows) * outer_stride + (r % inner_rows) * inner_stride.
struct LogitRows {
  void* data = nullptr;
  DType dtype = DType::kOther;  // float32, bfloat16 or float16
  int64_t num_rows = 0;
  int64_t vocab = 0;
  int64_t inner_rows = 1;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;

  SKYRL_HD int64_t first_element(int64_t r) const {
    if (r < inner_rows) return r * inner_stride;  // every row of a matrix
    const int64_t outer = r / inner_rows;
    return outer * outer_stride + (r - outer * inner_rows) * inner_stride;
  }
  SKYRL_HD char* row(int64_t r) const {
    return static_cast<char*>(data) + first_element(r) * (dtype == DType::kFloat32 ? 4 : 2);
  }
};

// The selected token of each row.
//   target_ids  int64 [num_rows]; in [0, vocab) where the mask is not 0
//   mask        uint8 [num_rows], or null: all ones. Rows of mask 0 are never read.
//   kept        where given, only these logits of a row exist: others are not read, have
//               probability 0 and get the gradient 0
struct Selection {
  const char* op = "";  // for messages
  const int64_t* target_ids = nullptr;
  const uint8_t* mask = nullptr;
  KeptSets kept;
  double temperature = 1.0;
  SKYRL_HD bool has(int64_t row) const { return mask == nullptr || mask[row] != 0; }
};

// Throws invalid_argument where a row's kept ids are not strictly ascending in [0, vocab), or miss
// its target. Rows of mask 0 are not checked.
void check_kept_sets(const Selection& selection, int64_t num_rows, int64_t vocab);

// Softmax is that of logits / temperature. Rows of mask 0 give 0 everywhere.
//   logprob  float [num_rows]
//   lse      double [num_rows], log sum exp
//   entropy  float [num_rows] in nats, or null
// Throws invalid_argument where a target is out of range, and what check_kept_sets throws, before
// any row is read.
void selected_logprob_cpu(const LogitRows& logits, const Selection& selection, float* logprob,
                          double* lse, float* entropy, int num_threads);

// Gradient with respect to the logits, in rows laid out like `grad`, which may be `logits` itself.
// Rows of mask 0, and rows whose incoming gradients are 0, are set to 0 and not read.
// A target below 0 is not among the row's logits (a slice of the vocabulary).
//   lse, entropy   outputs of the forward; entropy only with grad_entropy
//   grad_logprob   float [num_rows], or null: zeros
//   grad_entropy   float [num_rows], or null: zeros
void selected_logprob_backward_cpu(const LogitRows& logits, const Selection& selection,
                                   const double* lse, const float* entropy,
                                   const float* grad_logprob, const float* grad_entropy,
                                   const LogitRows& grad, int num_threads);

// Several tokens of each row.
//   target_ids  int64 [num_rows, per_row]; in [0, vocab) where the mask is not 0; an id may be
//               there several times
//   mask        uint8 [num_rows], or null: all ones. Rows of mask 0 are never read.
struct GatheredIds {
  const int64_t* target_ids = nullptr;
  int64_t per_row = 0;
  const uint8_t* mask = nullptr;
  double temperature = 1.0;
  SKYRL_HD bool has(int64_t row) const { return mask == nullptr || mask[row] != 0; }
  SKYRL_HD const int64_t* of_row(int64_t row) const { return target_ids + row * per_row; }
};

// Rows of mask 0 give 0.
//   logprob  float [num_rows, per_row]
//   lse      double [num_rows], log sum exp
// Throws invalid_argument where a target is out of range, before any row is read.
void gathered_logprob_cpu(const LogitRows& logits, const GatheredIds& ids, float* logprob,
                          double* lse, int num_threads);

// Gradient with respect to the logits; those of equal ids of a row add. Rows of mask 0, and rows
// whose incoming gradients are all 0, are set to 0 and not read. `grad` is not `logits`.
//   lse           output of the forward
//   grad_logprob  float [num_rows, per_row]
void gathered_logprob_backward_cpu(const LogitRows& logits, const GatheredIds& ids,
                                   const double* lse, const float* grad_logprob,
                                   const LogitRows& grad, int num_threads);

// The policy loss of each row's token; arrays are float [num_rows].
struct TokenLossInputs {
  LossKind loss = LossKind::kRegular;  // a loss of single tokens: not kGspo, kClipCov, kKlCov
  KlKind kl = KlKind::kNone;
  LossParams<float> params;
  const float* old_logprobs = nullptr;  // null: the log-probabilities themselves (ratio 1)
  const float* advantages = nullptr;    // null only for kCrossEntropy
  const float* reference = nullptr;     // for the KL penalty; null without
  // The weights of the streams: policy loss, -logprob and KL penalty.
  const float* token_weights = nullptr;          // null: ones
  const float* cross_entropy_weights = nullptr;  // null: zeros
  const float* kl_weights = nullptr;             // null: ones
  const float* weights = nullptr;                // multiply all: the reduction
};

// One row's of them.
struct RowLossInputs {
  float old_logprob, advantage, reference;
  float token_weight, cross_entropy_weight, kl_weight, weight;
};

SKYRL_HD RowLossInputs row_loss_inputs(const TokenLossInputs& in, int64_t row) {
  RowLossInputs out;
  out.old_logprob = in.old_logprobs ? in.old_logprobs[row] : 0.0f;
  out.advantage = in.advantages ? in.advantages[row] : 0.0f;
  out.reference = in.kl != KlKind::kNone ? in.reference[row] : 0.0f;
  out.token_weight = in.token_weights ? in.token_weights[row] : 1.0f;
  out.cross_entropy_weight = in.cross_entropy_weights ? in.cross_entropy_weights[row] : 0.0f;
  out.kl_weight = in.kl_weights ? in.kl_weights[row] : 1.0f;
  out.weight = in.weights[row];
  return out;
}

// d loss / d logprob of a row's token. A weight of 0 drops a stream, even where that would be NaN.
SKYRL_HD float loss_gradient(const TokenLossInputs& in, const RowLossInputs& row, float logprob) {
  const float old_logprob = in.old_logprobs ? row.old_logprob : logprob;
  const TokenLoss<float> token = token_loss(in.loss, in.params, logprob, old_logprob,
                                            logprob - old_logprob, row.advantage, false);
  float grad = row.token_weight != 0.0f ? row.token_weight * token.grad : 0.0f;
  if (in.kl != KlKind::kNone && row.kl_weight != 0.0f) {
    grad += in.params.kl_coef * row.kl_weight * token_kl(in.kl, logprob, row.reference).grad;
  }
  if (in.cross_entropy_weights) grad -= row.cross_entropy_weight;
  return grad * row.weight;
}

// Log-probability of each row and gradient of the loss in one pass: the gradient is written while
// the row is still in the cache. Rows of mask 0 give 0 and are never read. The value and metrics of
// the loss come from policy_loss_cpu, called with the log-probabilities.
//   logprob  float [num_rows]
//   entropy  float [num_rows], or null
//   grad     rows for the gradient of the loss with respect to the logits; may be `logits` itself;
//            null: not computed
void masked_logprob_loss_cpu(const LogitRows& logits, const Selection& selection,
                             const TokenLossInputs& in, float* logprob, float* entropy,
                             const LogitRows* grad, int num_threads);

}  // namespace skyrl_fast
