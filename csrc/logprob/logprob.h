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

  SKYRL_HD char* row(int64_t r) const {
    const int64_t element = r / inner_rows * outer_stride + r % inner_rows * inner_stride;
    const int64_t item_size = dtype == DType::kFloat32 ? 4 : 2;
    return static_cast<char*>(data) + element * item_size;
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

// d loss / d logprob of a row's token. A weight of 0 drops a stream, even where that would be NaN.
SKYRL_HD float loss_gradient(const TokenLossInputs& in, int64_t row, float logprob) {
  const float old_logprob = in.old_logprobs ? in.old_logprobs[row] : logprob;
  const float advantage = in.advantages ? in.advantages[row] : 0.0f;
  const TokenLoss<float> token =
      token_loss(in.loss, in.params, logprob, old_logprob, logprob - old_logprob, advantage, false);
  const float token_weight = in.token_weights ? in.token_weights[row] : 1.0f;
  float grad = token_weight != 0.0f ? token_weight * token.grad : 0.0f;
  const float kl_weight = in.kl_weights ? in.kl_weights[row] : 1.0f;
  if (in.kl != KlKind::kNone && kl_weight != 0.0f) {
    grad += in.params.kl_coef * kl_weight * token_kl(in.kl, logprob, in.reference[row]).grad;
  }
  if (in.cross_entropy_weights) grad -= in.cross_entropy_weights[row];
  return grad * in.weights[row];
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
