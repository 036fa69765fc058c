// Selected log-probability and entropy: one read of each row forward, one more backward.
#include "logprob/logit_rows_cuda.h"
#include "logprob/logprob_cuda.h"

namespace skyrl_fast {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLoads = 4;  // per thread in flight; 16 KB per block, four blocks per multiprocessor
constexpr int kBlocks = 4;
constexpr int kBackwardVectors = 2 * kThreads * kLoads;  // of one block

template <typename T, bool kEntropy>
__global__ void __launch_bounds__(kThreads, kBlocks)
    forward_kernel(const LogitRows logits, const Selection selection, float scale, float* logprob,
                   double* lse, float* entropy) {
  const int64_t r = blockIdx.x;
  if (!selection.has(r)) {
    if (threadIdx.x == 0) {
      logprob[r] = 0.0f;
      lse[r] = 0.0;
      if (kEntropy) entropy[r] = 0.0f;
    }
    return;
  }
  const T* row = row_of<T>(logits, r);
  const KeptIds kept = selection.kept.of_row(r);
  float target_x = 0.0f;
  if (threadIdx.x == 0) target_x = target_logit(row, selection.target_ids[r], logits.vocab, kept);
  SoftmaxPart part;
  if (kept.is_full()) {
    const RowSplit<T> split(row, logits.vocab);
    part = row_part<kEntropy, T, kThreads, kLoads>(row, split, logits.vocab, scale);
  } else {
    part = kept_part<kEntropy>(row, kept, logits.vocab, threadIdx.x, kThreads, scale);
  }
  part = combine_block<kEntropy, kWarps>(part, block_shared<SoftmaxPart>());
  if (threadIdx.x != 0) return;
  const RowResult result = row_result(part, target_x, scale);
  logprob[r] = static_cast<float>(result.logprob);
  lse[r] = result.lse;
  if (kEntropy) entropy[r] = static_cast<float>(result.entropy);
}

struct Gradients {
  const double* lse;
  const float* entropy;
  const float* grad_logprob;
  const float* grad_entropy;
};

// Grid x is rows, grid y parts of a row. Loads precede stores: grad may be logits.
template <typename T, bool kEntropy>
__global__ void __launch_bounds__(kThreads, kBlocks)
    backward_kernel(const LogitRows logits, const Selection selection, float scale,
                    float inv_temperature, const Gradients in, const LogitRows grad) {
  constexpr int kPerVector = RowSplit<T>::kPerVector;
  const int64_t r = blockIdx.x;
  const bool trained = selection.has(r);
  const float grad_logprob = trained && in.grad_logprob != nullptr ? in.grad_logprob[r] : 0.0f;
  const float grad_entropy = kEntropy && trained ? in.grad_entropy[r] : 0.0f;
  T* grad_row = row_of<T>(grad, r);
  const int begin = static_cast<int>(blockIdx.y) * kBackwardVectors, end = begin + kBackwardVectors;
  if (grad_logprob == 0.0f && grad_entropy == 0.0f) {  // then the logits are not read
    zero_row(grad_row, logits.vocab, begin + static_cast<int>(threadIdx.x), kThreads, end);
    return;
  }
  const T* row = row_of<T>(logits, r);
  const KeptIds kept = selection.kept.of_row(r);
  const GradTerms terms = grad_terms(in.lse[r], kEntropy ? in.entropy[r] : 0.0f, grad_logprob,
                                     grad_entropy, inv_temperature);
  int64_t target = selection.target_ids[r];
  if (target >= logits.vocab || (!kept.is_full() && kept.find(target) < 0)) target = -1;
  const GradientRow<T> at{row, grad_row, logits.vocab, target, scale};
  const auto at_target = [&](float x) { return target_gradient(terms, x, scale, inv_temperature); };
  if (same_alignment(row, grad_row)) {
    write_gradient<kEntropy, T, kThreads, kLoads>(at, kept, terms, at_target, begin, end,
                                                  blockIdx.y == 0);
  } else {
    const int64_t first = int64_t{begin} * kPerVector, last = int64_t{end} * kPerVector;
    write_elements<kEntropy>(at, kept, terms, at_target, first + threadIdx.x, kThreads,
                             last < logits.vocab ? last : logits.vocab);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const LogitRows rows, const float* factor) {
  const float f = *factor;
  if (f == 1.0f) return;
  for (int64_t r = blockIdx.x; r < rows.num_rows; r += gridDim.x) {
    T* row = row_of<T>(rows, r);
    const RowSplit<T> split(row, rows.vocab);
    for (int64_t k = threadIdx.x; k < split.num_vectors; k += kThreads) {
      T* at = row + split.head + k * RowSplit<T>::kPerVector;
      Vector v = load_vector(at);
      float x[RowSplit<T>::kPerVector];
      unpack<T>(v, x);
#pragma unroll
      for (float& value : x) value *= f;
      pack(x, &v, at);
      store_vector(at, v);
    }
    const int single = split.single(static_cast<int>(threadIdx.x), rows.vocab);
    if (single >= 0) row[single] = from_float<T>(to_float(row[single]) * f);
  }
}

float scale_of(double temperature) { return static_cast<float>(kLog2E / temperature); }

}  // namespace

void selected_logprob_cuda(const LogitRows& logits, const Selection& selection, float* logprob,
                           double* lse, float* entropy, cudaStream_t stream) {
  if (logits.num_rows == 0) return;
  Launch l;
  l.grid_x = logits.num_rows;
  l.threads = kThreads;
  l.shared_bytes = kWarps * static_cast<int>(sizeof(SoftmaxPart));
  l.stream = stream;
  with_element("selected_logprob", logits, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto kernel = entropy != nullptr ? forward_kernel<T, true> : forward_kernel<T, false>;
    launch("selected_logprob", l, kernel, logits, selection, scale_of(selection.temperature),
           logprob, lse, entropy);
  });
}

void selected_logprob_backward_cuda(const LogitRows& logits, const Selection& selection,
                                    const double* lse, const float* entropy,
                                    const float* grad_logprob, const float* grad_entropy,
                                    const LogitRows& grad, cudaStream_t stream) {
  if (logits.num_rows == 0) return;
  with_element("selected_logprob", logits, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    constexpr int64_t kElements = int64_t{kBackwardVectors} * RowSplit<T>::kPerVector;
    Launch l;
    l.grid_x = logits.num_rows;
    l.grid_y = 1 + (logits.vocab - 1) / kElements;
    l.threads = kThreads;
    l.stream = stream;
    const auto kernel =
        grad_entropy != nullptr ? backward_kernel<T, true> : backward_kernel<T, false>;
    launch("selected_logprob backward", l, kernel, logits, selection,
           scale_of(selection.temperature), static_cast<float>(1.0 / selection.temperature),
           Gradients{lse, entropy, grad_logprob, grad_entropy}, grad);
  });
}

void scale_rows_cuda(const LogitRows& rows, const float* factor, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 2048;  // as many as run at once
  if (rows.num_rows == 0) return;
  with_element("masked_logprob_loss", rows, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    Launch l;
    l.grid_x = rows.num_rows < kMostBlocks ? rows.num_rows : kMostBlocks;
    l.threads = kThreads;
    l.stream = stream;
    launch("masked_logprob_loss", l, scale_kernel<T>, rows, factor);
  });
}

}  // namespace skyrl_fast
