// Logits to log-probabilities and the gradient of a policy loss: rows that fit stay in registers
// between their one read and their one write, others are read twice.
#include "logprob/logit_rows_cuda.h"
#include "logprob/logprob_cuda.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "masked_logprob_loss";
constexpr int kRevisitThreads = 512;
constexpr int kRevisitLoads = 4;
constexpr int kMostThreads = 512;
constexpr int kFewVectors = 8, kManyVectors = 16;  // held by a thread
// Threads of a multiprocessor, whose registers they share. The fewer each has, the more rows
// overlap: one waits for its sums, others load or store. With fewer than these a kernel spills.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
constexpr int kFewThreads = 1024, kManyThreads = 640;  // 64 and 96 registers
#else
constexpr int kFewThreads = 768, kManyThreads = kMostThreads;  // 80 and 128
#endif
// Of float32 logits with their entropy, which take more than 64 registers.
constexpr int kFewFloatThreads = kFewThreads < 896 ? kFewThreads : 896;
constexpr int kMostWarps = kMostThreads / kWarp;

template <typename T>
constexpr int most_threads(int vectors, bool has_entropy) {
  if (vectors != kFewVectors) return kManyThreads;
  return has_entropy && sizeof(T) == sizeof(float) ? kFewFloatThreads : kFewThreads;
}

struct Outputs {
  float* logprob;
  float* entropy;  // null in kernels without it
  bool wants_grad;
};

// What thread 0 reads of a row besides its logits, before the first barrier: after that of the
// cluster another block may overwrite the target's logit.
struct RowInputs {
  float target_x;
  RowLossInputs loss;
};

// The gradient of a row: 2^(scale * x - offset) * factor off the target. Factor 0: only zeros. The
// target's is left to the thread that writes it: all threads wait for this.
struct RowGradient {
  double lse;
  float offset, factor, slope;
};

struct SharedState {
  alignas(kVectorBytes) SoftmaxPart total;  // of the block; the first vector: see cluster_read
  RowInputs inputs;
  RowGradient gradient;
  SoftmaxPart warps[kMostWarps];
};

template <typename T>
__device__ __forceinline__ RowInputs row_inputs(const T* row, const TokenLossInputs& in, int64_t r,
                                                int64_t target, int64_t vocab,
                                                const KeptIds& kept) {
  RowInputs out;
  out.loss = row_loss_inputs(in, r);
  out.target_x = target_logit(row, target, vocab, kept);
  return out;
}

// The gradient of a row's loss from its sums; writes the outputs where `writes` is set.
template <bool kEntropy>
__device__ __forceinline__ RowGradient finish_row(const SoftmaxPart& total, const RowInputs& row,
                                                  const TokenLossInputs& in, int64_t r, float scale,
                                                  float inv_temperature, const Outputs& out,
                                                  bool writes) {
  const RowResult result = row_result(total, row.target_x, scale);
  const float logprob = static_cast<float>(result.logprob);
  if (writes) {
    out.logprob[r] = logprob;
    if (kEntropy) out.entropy[r] = static_cast<float>(result.entropy);
  }
  const float slope = loss_gradient(in, row.loss, logprob);
  const GradTerms terms = grad_terms(result.lse, 0.0f, slope, 0.0f, inv_temperature);
  return {result.lse, terms.offset, slope == 0.0f ? 0.0f : terms.a, slope};
}

template <bool kEntropy>
__device__ __forceinline__ void write_masked(int64_t r, const Outputs& out) {
  out.logprob[r] = 0.0f;
  if (kEntropy) out.entropy[r] = 0.0f;
}

// The terms of off_target_gradient without an entropy's.
__device__ __forceinline__ GradTerms terms_of(const RowGradient& gradient) {
  GradTerms terms;
  terms.offset = gradient.offset;
  terms.a = gradient.factor;
  return terms;
}

__device__ __forceinline__ float gradient_at_target(const SharedState& shared, float scale,
                                                    float inv_temperature) {
  GradTerms terms;
  terms.lse = shared.gradient.lse;
  terms.logprob_grad = shared.gradient.slope;
  return target_gradient(terms, shared.inputs.target_x, scale, inv_temperature);
}

// The sums of the cluster's blocks, with the same bits in every block; called by a full warp, whose
// lanes read one block's each.
template <bool kEntropy>
__device__ __forceinline__ SoftmaxPart cluster_total(int size) {
  constexpr int kMostBlocks = 8;
  const int rank = static_cast<int>(threadIdx.x) % kMostBlocks;
  SoftmaxPart part;
  if (rank < size) {
    const Vector v = cluster_read(rank);
    part.max = float_of_bits(v.word[0]);
    part.sum = float_of_bits(v.word[1]);
    part.weighted = float_of_bits(v.word[2]);
  }
  return combine_lanes<kEntropy, kMostBlocks>(part);
}

// A thread's number among those of its cluster, and how many these are.
__device__ __forceinline__ int lane_of_cluster() {
  return cluster_rank() * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
}
__device__ __forceinline__ int lanes_of_cluster() {
  return cluster_size() * static_cast<int>(blockDim.x);
}

// A thread's vectors of a row: lane, lane + step, ...; -inf behind the row's end.
template <typename T, int kVectors>
__device__ __forceinline__ void load_held(const T* row, const RowSplit<T>& split, int lane,
                                          int step, Vector (&v)[kVectors]) {
  const T* at = row + split.head + int64_t{lane} * RowSplit<T>::kPerVector;
  const int64_t stride = int64_t{step} * RowSplit<T>::kPerVector;
  if (lane + (kVectors - 1) * step < split.num_vectors) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) v[k] = load_vector_once(at + k * stride);
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      v[k] = empty_vector<T>();
      if (lane + k * step < split.num_vectors) v[k] = load_vector_once(at + k * stride);
    }
  }
}

// Writes the gradient of a thread's vectors of a row.
template <typename T, int kVectors>
__device__ __forceinline__ void store_held(T* grad, const RowSplit<T>& split, int lane, int step,
                                           const Vector (&v)[kVectors], const GradTerms& terms,
                                           float scale) {
  T* at = grad + split.head + int64_t{lane} * RowSplit<T>::kPerVector;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (lane + k * step >= split.num_vectors) return;
    store_vector(at, vector_gradient<false, T>(v[k], terms, scale));
    at += int64_t{step} * RowSplit<T>::kPerVector;
  }
}

// One row per cluster. All loads of a thread are issued before the first is used; the gradient is
// computed from the registers that hold them. A row with a kept set holds nothing: its kept logits
// are few, and read again for the gradient.
template <typename T, int kVectors, bool kEntropy>
__global__ void __launch_bounds__(most_threads<T>(kVectors, kEntropy), 1)
    visit_kernel(const LogitRows logits, const Selection selection, const TokenLossInputs in,
                 float scale, float inv_temperature, const Outputs out, const LogitRows grad) {
  const int rank = cluster_rank(), size = cluster_size();
  const int64_t r = cluster_index();
  int lane = lane_of_cluster(), step = lanes_of_cluster();
  if (!selection.has(r)) {  // in all blocks of the cluster
    zero_row(row_of<T>(grad, r), logits.vocab, lane, step, INT32_MAX);
    if (lane == 0) write_masked<kEntropy>(r, out);
    return;
  }
  const T* row = row_of<T>(logits, r);
  const RowSplit<T> split(row, logits.vocab);
  const KeptIds kept = selection.kept.of_row(r);
  const int64_t target = selection.target_ids[r];
  Vector v[kVectors];
  if (kept.is_full()) load_held(row, split, lane, step, v);
  SharedState* shared = block_shared<SharedState>();
  if (threadIdx.x == 0) shared->inputs = row_inputs(row, in, r, target, logits.vocab, kept);

  SoftmaxPart part;
  if (kept.is_full()) {
    if (lane < RowSplit<T>::kSingles) {
      const int single = split.single(lane, logits.vocab);
      const float x = single >= 0 ? to_float(row[single]) : -INFINITY;
      accumulate_single<kEntropy>(x, scale, &part);
    }
    accumulate_vectors<kEntropy, T>(v, scale, &part);
  } else {
    part = kept_part<kEntropy>(row, kept, logits.vocab, lane, step, scale);
  }
  part = combine_block<kEntropy, kMostWarps>(part, shared->warps);
  if (threadIdx.x == 0) {
    shared->total = part;
    cluster_publish();
  }
  // Thread 0 alone has written what other blocks read, and has read the target's logit before.
  cluster_wait(cluster_arrive());
  if (threadIdx.x < kWarp) {
    part = cluster_total<kEntropy>(size);
    if (threadIdx.x == 0) {
      shared->gradient =
          finish_row<kEntropy>(part, shared->inputs, in, r, scale, inv_temperature, out, rank == 0);
    }
  }
  __syncthreads();
  // Shared memory may be released when all blocks have read it: the sums they add have been used.
  const ClusterTicket has_read = cluster_arrive();
  // Computed again, so that they take no registers between the sums.
  lane = lane_of_cluster();
  step = lanes_of_cluster();
  T* grad_row = row_of<T>(grad, r);
  const GradTerms terms = terms_of(shared->gradient);
  const auto at_target = [=](float) { return gradient_at_target(*shared, scale, inv_temperature); };
  const GradientRow<T> at{row, grad_row, logits.vocab, target, scale};
  if (terms.a == 0.0f) {
    zero_row(grad_row, logits.vocab, lane, step, INT32_MAX);
  } else if (!same_alignment(row, grad_row)) {
    write_elements<false>(at, kept, terms, at_target, lane, step, logits.vocab);
  } else {
    // Read again: to keep its logit would take registers of all threads.
    const int single = split.single(lane, logits.vocab);
    if (single >= 0) {
      const float x = load_logit(row, single, kept);
      grad_row[single] = from_float<T>(
          single == target ? at_target(x) : off_target_gradient<false>(terms, x, scale));
    }
    if (kept.is_full()) {
      store_held(grad_row, split, lane, step, v, terms, scale);
    } else {
      write_kept_vectors<false>(at, split, kept, terms, lane, step, split.num_vectors);
    }
    // The target's element is written after its vector, by the same thread.
    const int target_vector = split.vector_of(target);
    if (target_vector >= 0 && target_vector % step == lane) {
      grad_row[target] = from_float<T>(gradient_at_target(*shared, scale, inv_temperature));
    }
  }
  cluster_wait(has_read);
}

// One row per block, read a second time for its gradient (from the L2 cache, if it is still there).
template <typename T, bool kEntropy>
__global__ void __launch_bounds__(kRevisitThreads, 2)
    revisit_kernel(const LogitRows logits, const Selection selection, const TokenLossInputs in,
                   float scale, float inv_temperature, const Outputs out, const LogitRows grad) {
  const int64_t r = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  T* grad_row = row_of<T>(grad, r);
  if (!selection.has(r)) {
    if (out.wants_grad) zero_row(grad_row, logits.vocab, lane, kRevisitThreads, INT32_MAX);
    if (lane == 0) write_masked<kEntropy>(r, out);
    return;
  }
  const T* row = row_of<T>(logits, r);
  const int64_t target = selection.target_ids[r];
  const KeptIds kept = selection.kept.of_row(r);
  SharedState* shared = block_shared<SharedState>();
  if (lane == 0) shared->inputs = row_inputs(row, in, r, target, logits.vocab, kept);
  SoftmaxPart part;
  if (kept.is_full()) {
    const RowSplit<T> split(row, logits.vocab);
    part = row_part<kEntropy, T, kRevisitThreads, kRevisitLoads>(row, split, logits.vocab, scale);
  } else {
    part = kept_part<kEntropy>(row, kept, logits.vocab, lane, kRevisitThreads, scale);
  }
  part = combine_block<kEntropy, kMostWarps>(part, shared->warps);
  if (lane == 0) {
    shared->gradient =
        finish_row<kEntropy>(part, shared->inputs, in, r, scale, inv_temperature, out, true);
  }
  if (!out.wants_grad) return;
  __syncthreads();
  const GradTerms terms = terms_of(shared->gradient);
  const auto at_target = [=](float) { return gradient_at_target(*shared, scale, inv_temperature); };
  const GradientRow<T> at{row, grad_row, logits.vocab, target, scale};
  if (terms.a == 0.0f) {
    zero_row(grad_row, logits.vocab, lane, kRevisitThreads, INT32_MAX);
  } else if (same_alignment(row, grad_row)) {
    write_gradient<false, T, kRevisitThreads, kRevisitLoads>(at, kept, terms, at_target, 0,
                                                             INT32_MAX, true);
  } else {
    write_elements<false>(at, kept, terms, at_target, lane, kRevisitThreads, logits.vocab);
  }
}

constexpr int kMostFewThreads = 384;  // of a block
constexpr int kUsualThreads = 256;
constexpr int kMaxCluster = 8;  // supported by every device of compute capability 9 or higher

template <typename T, bool kEntropy>
auto kernel_of(const VisitPlan& plan) {
  switch (plan.vectors) {
    case kFewVectors: return visit_kernel<T, kFewVectors, kEntropy>;
    case kManyVectors: return visit_kernel<T, kManyVectors, kEntropy>;
    default: return revisit_kernel<T, kEntropy>;
  }
}

}  // namespace

int visit_code_major() { return code_major(revisit_kernel<float, false>); }

VisitPlan plan_visit(int64_t vocab, DType dtype, int code_major) {
  const int64_t per_vector = dtype == DType::kFloat32 ? 4 : 8;
  const int64_t num_vectors = vocab / per_vector;
  const int most = code_major >= 9 ? kMaxCluster : 1;
  int cluster = 1;
  while (cluster < most && num_vectors > int64_t{kFewVectors} * kUsualThreads * cluster) {
    cluster *= 2;
  }
  // As many threads as hold the row: idle ones would issue its fixed instructions all the same.
  const auto plan = [&](int vectors, int most_threads) {
    const int64_t of_a_warp = int64_t{vectors} * cluster * kWarp;
    const int64_t num_warps = num_vectors == 0 ? 1 : (num_vectors + of_a_warp - 1) / of_a_warp;
    const int64_t threads = num_warps * kWarp;
    return VisitPlan{threads <= most_threads ? vectors : 0, static_cast<int>(threads), cluster};
  };
  const VisitPlan few = plan(kFewVectors, kMostFewThreads);
  const VisitPlan many = plan(kManyVectors, kMostThreads);
  if (few.vectors != 0) return few;
  return many.vectors != 0 ? many : VisitPlan{0, kRevisitThreads, 1};
}

void masked_logprob_loss_cuda(const LogitRows& logits, const Selection& selection,
                              const TokenLossInputs& in, float* logprob, float* entropy,
                              const LogitRows* grad, cudaStream_t stream) {
  if (logits.num_rows == 0) return;
  VisitPlan plan = {0, kRevisitThreads, 1};
  if (grad != nullptr) plan = plan_visit(logits.vocab, logits.dtype, visit_code_major());
  Launch l;
  l.grid_x = logits.num_rows * plan.cluster;
  l.threads = plan.threads;
  l.shared_bytes = static_cast<int>(sizeof(SharedState));
  l.cluster = plan.cluster;
  l.stream = stream;
  const Outputs out{logprob, entropy, grad != nullptr};
  with_element(kOp, logits, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const auto kernel = entropy != nullptr ? kernel_of<T, true>(plan) : kernel_of<T, false>(plan);
    launch(kOp, l, kernel, logits, selection, in,
           static_cast<float>(kLog2E / selection.temperature),
           static_cast<float>(1.0 / selection.temperature), out, grad != nullptr ? *grad : logits);
  });
}

}  // namespace skyrl_fast
