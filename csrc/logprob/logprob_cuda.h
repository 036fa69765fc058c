// The ops of logprob.h on a CUDA device: the same arguments, in its memory. All enqueue on `stream`
// without synchronizing. A target out of range gives NaN, not an error.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "logprob/logprob.h"

namespace skyrl_fast {

void selected_logprob_cuda(const LogitRows& logits, const Selection& selection, float* logprob,
                           double* lse, float* entropy, cudaStream_t stream);

void selected_logprob_backward_cuda(const LogitRows& logits, const Selection& selection,
                                    const double* lse, const float* entropy,
                                    const float* grad_logprob, const float* grad_entropy,
                                    const LogitRows& grad, cudaStream_t stream);

// How masked_logprob_loss processes a row: held in the registers of a cluster of blocks and read
// once, or, where it does not fit (vectors == 0), read twice by one block.
struct VisitPlan {
  int vectors = 0;  // of 16 bytes, held by each thread
  int threads = 0;
  int cluster = 1;
};
VisitPlan plan_visit(int64_t vocab, DType dtype, int code_major);

// The major compute capability of the code that runs on the current device, see cuda_device.h.
int visit_code_major();

void masked_logprob_loss_cuda(const LogitRows& logits, const Selection& selection,
                              const TokenLossInputs& in, float* logprob, float* entropy,
                              const LogitRows* grad, cudaStream_t stream);

// Multiplies the rows by *factor, a float on the device; a no-op where that is 1.
void scale_rows_cuda(const LogitRows& rows, const float* factor, cudaStream_t stream);

}  // namespace skyrl_fast
