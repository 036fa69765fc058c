// Selected log-probability and entropy of logit rows on a CUDA device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tensor.h"

namespace skyrl_fast {

// logits [num_rows, vocab] of `dtype` (float32, float16, bfloat16), rows `row_stride` elements
// apart; targets int64 [num_rows]; mask uint8 [num_rows] or null. Rows with mask 0 are not read and
// get zeros. logprob and entropy (null: not wanted) are float32 [num_rows], lse float64: that of
// the logits divided by the temperature. Enqueues on `stream`.
void selected_logprob_cuda(const void* logits, DType dtype, int64_t num_rows, int64_t vocab,
                           int64_t row_stride, const int64_t* targets, const uint8_t* mask,
                           float temperature, float* logprob, double* lse, float* entropy,
                           cudaStream_t stream);

// Gradient with respect to the logits; grad may be logits itself. grad_logprob may be null,
// grad_entropy and entropy may both be null. Rows with mask 0 get zeros and are not read.
void selected_logprob_backward_cuda(const void* logits, DType dtype, int64_t num_rows,
                                    int64_t vocab, int64_t row_stride, const int64_t* targets,
                                    const uint8_t* mask, float temperature, const double* lse,
                                    const float* entropy, const float* grad_logprob,
                                    const float* grad_entropy, void* grad, int64_t grad_row_stride,
                                    cudaStream_t stream);

}  // namespace skyrl_fast
