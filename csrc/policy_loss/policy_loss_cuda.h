// The ops of policy_loss.h on a CUDA device: the same arguments, in its memory. All enqueue on
// `stream` without synchronizing. Offsets of ragged rows are not checked.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "policy_loss/loss_sums.h"

namespace skyrl_fast {

constexpr int64_t kCellsPerSum = 2048;  // the fewest of one partial sum

// `partial`: work space, one for every kCellsPerSum cells. `metrics` [kNumPolicyLossMetrics]. The
// same input, of the same alignment, gives the same bits on every device.
template <typename T>
void policy_loss_cuda(LossKind loss, KlKind kl, const LossParams<T>& params,
                      const PolicyLossInputs<T>& in, int64_t num_cells, T* grad, LossSums* partial,
                      double* metrics, cudaStream_t stream);

// Multiplies the cells by *factor, a T on the device; a no-op where that is 1.
template <typename T>
void scale_cells_cuda(T* cells, int64_t num_cells, const T* factor, cudaStream_t stream);

template <typename T>
void kl_penalty_cuda(KlKind kl, const T* logprobs, const T* reference, const LossMask& mask,
                     const T* grad_out, int64_t num_cells, T* out, cudaStream_t stream);

template <typename T>
void delta_sums_cuda(const T* a, const T* b, const LossMask& mask, const RowLayout& rows,
                     double* sums, cudaStream_t stream);

}  // namespace skyrl_fast
