// Selected log-probabilities on the CPU: rows are distributed over threads, one pass per row.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/parallel.h"
#include "core/simd.h"
#include "logprob/logprob.h"
#include "logprob/logprob_rows.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kElementsPerThread = 1 << 18;  // below this a thread costs more than it saves
constexpr int64_t kElementsPerTake = 1 << 16;    // per fetch of the shared row counter

const RowKernels& row_kernels(DType dtype) {
  const RowKernelSet& set = SKYRL_OF_SIMD_LEVEL(logprob_rows);
  if (dtype == DType::kBFloat16) return set.bfloat16;
  if (dtype == DType::kFloat16) return set.float16;
  return set.float32;
}

void check_targets(const LogitRows& logits, const Selection& selection) {
  for (int64_t r = 0; r < logits.num_rows; ++r) {
    const int64_t target = selection.target_ids[r];
    if (selection.has(r) && (target < 0 || target >= logits.vocab)) {
      throw std::invalid_argument(std::string(selection.op) + ": target_ids must be in [0, " +
                                  std::to_string(logits.vocab) + ") where the mask is 1, got " +
                                  std::to_string(target) + " in row " + std::to_string(r));
    }
  }
}

// Masked rows cost nothing, so equal parts are not equal work: threads fetch rows dynamically.
template <typename Fn>
void for_each_row(const LogitRows& logits, int num_threads, const Fn& fn) {
  const int64_t rows_per_thread = kElementsPerThread / logits.vocab + 1;
  const int64_t rows_per_take = kElementsPerTake / logits.vocab + 1;
  const int64_t most = (logits.num_rows + rows_per_thread - 1) / rows_per_thread;
  const int64_t threads = most < num_threads ? most : num_threads;
  std::atomic<int64_t> next{0};
  parallel_for(static_cast<int>(threads), threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (;;) {
        const int64_t first = next.fetch_add(rows_per_take, std::memory_order_relaxed);
        if (first >= logits.num_rows) break;
        const int64_t last = std::min(first + rows_per_take, logits.num_rows);
        for (int64_t r = first; r < last; ++r) fn(r);
      }
    }
  });
}

int64_t row_bytes(const LogitRows& logits) {
  return logits.vocab * (logits.dtype == DType::kFloat32 ? 4 : 2);
}

}  // namespace

void selected_logprob_cpu(const LogitRows& logits, const Selection& selection, float* logprob,
                          double* lse, float* entropy, int num_threads) {
  if (logits.num_rows == 0) return;
  check_targets(logits, selection);
  const RowKernels& kernels = row_kernels(logits.dtype);
  for_each_row(logits, num_threads, [&](int64_t r) {
    RowStats stats = {0.0, 0.0, 0.0};
    if (selection.has(r)) {
      kernels.forward(logits.row(r), logits.vocab, selection.target_ids[r], selection.temperature,
                      entropy != nullptr, &stats);
    }
    logprob[r] = static_cast<float>(stats.logprob);
    lse[r] = stats.lse;
    if (entropy != nullptr) entropy[r] = static_cast<float>(stats.entropy);
  });
}

void selected_logprob_backward_cpu(const LogitRows& logits, const Selection& selection,
                                   const double* lse, const float* entropy,
                                   const float* grad_logprob, const float* grad_entropy,
                                   const LogitRows& grad, int num_threads) {
  if (logits.num_rows == 0) return;
  const RowKernels& kernels = row_kernels(logits.dtype);
  for_each_row(logits, num_threads, [&](int64_t r) {
    const RowGrads grads = {grad_logprob ? grad_logprob[r] : 0.0,
                            grad_entropy ? grad_entropy[r] : 0.0};
    if (!selection.has(r) || (grads.logprob == 0.0 && grads.entropy == 0.0)) {
      std::memset(grad.row(r), 0, row_bytes(logits));
      return;
    }
    const RowStats stats = {0.0, lse[r], grads.entropy != 0.0 ? entropy[r] : 0.0};
    kernels.backward(logits.row(r), logits.vocab, selection.target_ids[r], selection.temperature,
                     stats, grads, grad.row(r));
  });
}

void masked_logprob_loss_cpu(const LogitRows& logits, const Selection& selection,
                             const TokenLossInputs& in, float* logprob, float* entropy,
                             const LogitRows* grad, int num_threads) {
  if (logits.num_rows == 0) return;
  check_targets(logits, selection);
  const RowKernels& kernels = row_kernels(logits.dtype);
  for_each_row(logits, num_threads, [&](int64_t r) {
    RowStats stats = {0.0, 0.0, 0.0};
    float loss_grad = 0.0f;
    if (selection.has(r)) {
      kernels.forward(logits.row(r), logits.vocab, selection.target_ids[r], selection.temperature,
                      entropy != nullptr, &stats);
      loss_grad = loss_gradient(in, r, static_cast<float>(stats.logprob));
    }
    logprob[r] = static_cast<float>(stats.logprob);
    if (entropy != nullptr) entropy[r] = static_cast<float>(stats.entropy);
    if (grad == nullptr) return;
    if (loss_grad == 0.0f) {
      std::memset(grad->row(r), 0, row_bytes(logits));
    } else {
      kernels.backward(logits.row(r), logits.vocab, selection.target_ids[r], selection.temperature,
                       stats, {loss_grad, 0.0}, grad->row(r));
    }
  });
}

}  // namespace skyrl_fast
