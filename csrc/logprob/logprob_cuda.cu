// Selected log-probability and entropy: one read of each row forward, one more backward.
#include "logprob/logit_rows_cuda.h"
#include "logprob/logprob_cuda.h"

namespace skyrl_fast {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLoads = 4;  // per thread in flight; 16 KB per block, four blocks per multiprocessor
constexpr int kBlocks = 4;
constexpr int kBackwardVectors = kThreads * kLoads;  // of one block

template <typename T, bool kEntropy, bool kKept>
__global__ void __launch_bounds__(kThreads, kBlocks)
    forward_kernel(const LogitRows logits, const Selection selection, float scale, float* logprob,
                   double* lse, float* entropy) {
  const int64_t r = blockIdx.x;
  if (!selection.has(r)) {
    if (threadIdx.x == 0) {
      logprob[r] = 0.0f;
      lse[r] = 0.0;
      if (kEntropy && entropy != nullptr) entropy[r] = 0.0f;
    }
    return;
  }
  const T* row = reinterpret_cast<const T*>(logits.row(r));
  const KeptIds kept = kept_of<kKept>(selection, r);
  SoftmaxPart part;
  if (kept.is_full()) {
    const RowSplit<T> split(row, logits.vocab);
    part = row_part<kEntropy, T, kThreads, kLoads>(row, split, logits.vocab, scale);
  } else {
    part = kept_part<kEntropy, T, kThreads>(row, kept, logits.vocab, scale);
  }
  part = block_combine<kThreads>(part, block_shared<SoftmaxPart>());
  if (threadIdx.x != 0) return;
  const float target_x = target_logit(row, selection.target_ids[r], logits.vocab, kept);
  const RowResult result = row_result(part, target_x, scale);
  logprob[r] = static_cast<float>(result.logprob);
  lse[r] = result.lse;
  if (kEntropy && entropy != nullptr) entropy[r] = static_cast<float>(result.entropy);
}

struct Gradients {
  const double* lse;
  const float* entropy;
  const float* grad_logprob;
  const float* grad_entropy;
};

// Grid x is rows, grid y parts of a row. Loads precede stores: grad may be logits.
template <typename T, bool kKept>
__global__ void __launch_bounds__(kThreads, kBlocks)
    backward_kernel(const LogitRows logits, const Selection selection, float scale,
                    float inv_temperature, const Gradients in, const LogitRows grad) {
  const int64_t r = blockIdx.x;
  const T* row = reinterpret_cast<const T*>(logits.row(r));
  T* grad_row = reinterpret_cast<T*>(grad.row(r));
  const bool trained = selection.has(r);
  const float grad_logprob = trained && in.grad_logprob != nullptr ? in.grad_logprob[r] : 0.0f;
  const float grad_entropy = trained && in.grad_entropy != nullptr ? in.grad_entropy[r] : 0.0f;
  const bool zero = grad_logprob == 0.0f && grad_entropy == 0.0f;  // then the logits are not read
  const KeptIds kept = kept_of<kKept>(selection, r);
  GradTerms terms;
  int64_t target = -1;
  if (!zero) {
    terms = grad_terms(in.lse[r], grad_entropy != 0.0f ? in.entropy[r] : 0.0f, grad_logprob,
                       grad_entropy, inv_temperature);
    target = selection.target_ids[r];
    if (!kept.is_full() && kept.find(target) < 0) target = -1;
  }
  const auto at_target = [&](float x) { return target_gradient(terms, x, scale, inv_temperature); };
  const bool aligned = same_alignment(row, grad_row);
  const RowSplit<T> split(row, logits.vocab);
  const int64_t base = static_cast<int64_t>(blockIdx.y) * kBackwardVectors + threadIdx.x;
  Vector v[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    if (!zero && base + k * kThreads < split.num_vectors) {
      const int64_t first = split.first_of(base + k * kThreads);
      v[k] = kept.is_full() ? load_vector(row + first) : load_kept_vector(row, first, kept);
    }
  }
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    if (base + k * kThreads >= split.num_vectors) break;
    const int64_t first = split.first_of(base + k * kThreads);
    if (zero) {
      store_zeros<T>(grad_row + first, aligned);
    } else {
      store_vector_gradient<T>(v[k], terms, first, target, scale, at_target, grad_row, aligned);
    }
  }
  const int64_t single = blockIdx.y == 0 ? split.single(threadIdx.x, logits.vocab) : -1;
  if (single < 0) return;
  const float d = zero ? 0.0f
                       : single_gradient(terms, load_logit(row, single, kept), single, target,
                                         scale, at_target);
  grad_row[single] = from_float<T>(d);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const LogitRows rows, const float* factor) {
  const float f = *factor;
  if (f == 1.0f) return;
  for (int64_t r = blockIdx.x; r < rows.num_rows; r += gridDim.x) {
    T* row = reinterpret_cast<T*>(rows.row(r));
    const RowSplit<T> split(row, rows.vocab);
    for (int64_t k = threadIdx.x; k < split.num_vectors; k += kThreads) {
      T* at = row + split.first_of(k);
      Vector v = load_vector(at);
      float x[RowSplit<T>::kPerVector];
      unpack(v, x, at);
#pragma unroll
      for (float& value : x) value *= f;
      pack(x, &v, at);
      store_vector(at, v);
    }
    const int64_t single = split.single(threadIdx.x, rows.vocab);
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
  with_element("selected_logprob", logits.dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto full =
        entropy != nullptr ? forward_kernel<T, true, false> : forward_kernel<T, false, false>;
    const auto kernel = selection.kept.ids != nullptr ? forward_kernel<T, true, true> : full;
    launch("selected_logprob", l, kernel, logits, selection, scale_of(selection.temperature),
           logprob, lse, entropy);
  });
}

void selected_logprob_backward_cuda(const LogitRows& logits, const Selection& selection,
                                    const double* lse, const float* entropy,
                                    const float* grad_logprob, const float* grad_entropy,
                                    const LogitRows& grad, cudaStream_t stream) {
  if (logits.num_rows == 0) return;
  with_element("selected_logprob", logits.dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const int64_t most_vectors = logits.vocab / RowSplit<T>::kPerVector;
    Launch l;
    l.grid_x = logits.num_rows;
    l.grid_y = most_vectors == 0 ? 1 : (most_vectors + kBackwardVectors - 1) / kBackwardVectors;
    l.threads = kThreads;
    l.stream = stream;
    const bool has_sets = selection.kept.ids != nullptr;
    const auto kernel = has_sets ? backward_kernel<T, true> : backward_kernel<T, false>;
    launch("selected_logprob backward", l, kernel, logits, selection,
           scale_of(selection.temperature), static_cast<float>(1.0 / selection.temperature),
           Gradients{lse, entropy, grad_logprob, grad_entropy}, grad);
  });
}

void scale_rows_cuda(const LogitRows& rows, const float* factor, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 2048;  // as many as run at once
  if (rows.num_rows == 0) return;
  with_element("masked_logprob_loss", rows.dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    Launch l;
    l.grid_x = rows.num_rows < kMostBlocks ? rows.num_rows : kMostBlocks;
    l.threads = kThreads;
    l.stream = stream;
    launch("masked_logprob_loss", l, scale_kernel<T>, rows, factor);
  });
}

}  // namespace skyrl_fast
