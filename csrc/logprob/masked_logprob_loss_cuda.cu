// Logits to log-probabilities and the gradient of a policy loss: rows that fit stay in registers
// between their one read and their one write, others are read twice.
#include "logprob/logit_rows_cuda.h"
#include "logprob/logprob_cuda.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "masked_logprob_loss";
constexpr int kRevisitThreads = 512;
constexpr int kRevisitLoads = 4;

struct Outputs {
  float* logprob;
  float* entropy;  // may be null
  bool wants_grad;
};

// The gradient of a row: its terms, and its value at the target.
struct RowGradient {
  GradTerms terms;
  float target;
};

// Results of thread 0 for the other threads of its block, and for other blocks.
struct SharedState {
  SoftmaxPart total;  // of the block; the first member: other blocks read it by its offset
  RowGradient gradient;
  SoftmaxPart warps[kRevisitThreads / kWarp];
};

// The gradient of a row's loss from its sums; writes the outputs where `writes` is set.
__device__ __forceinline__ RowGradient finish_row(const SoftmaxPart& total, float target_x,
                                                  const TokenLossInputs& in, int64_t r, float scale,
                                                  float inv_temperature, const Outputs& out,
                                                  bool writes) {
  const RowResult result = row_result(total, target_x, scale);
  const float logprob = static_cast<float>(result.logprob);
  if (writes) {
    out.logprob[r] = logprob;
    if (out.entropy != nullptr) out.entropy[r] = static_cast<float>(result.entropy);
  }
  RowGradient gradient;
  gradient.terms =
      grad_terms(result.lse, 0.0f, loss_gradient(in, r, logprob), 0.0f, inv_temperature);
  gradient.target = target_gradient(gradient.terms, target_x, scale, inv_temperature);
  return gradient;
}

__device__ __forceinline__ void write_masked(int64_t r, const Outputs& out) {
  out.logprob[r] = 0.0f;
  if (out.entropy != nullptr) out.entropy[r] = 0.0f;
}

// Zeros in the vectors first, first + step, ... of a row, and in its single elements.
template <typename T>
__device__ __forceinline__ void zero_row(T* grad, const RowSplit<T>& split, int64_t vocab,
                                         int64_t first, int64_t step, bool aligned) {
  for (int64_t v = first; v < split.num_vectors; v += step) {
    store_zeros<T>(grad + split.first_of(v), aligned);
  }
  const int64_t single = split.single(first, vocab);
  if (single >= 0) grad[single] = from_float<T>(0.0f);
}

// Sums of the cluster's blocks, added in their order: every block gets the same bits.
__device__ __forceinline__ SoftmaxPart cluster_total() {
  constexpr int kMax = offsetof(SharedState, total) / sizeof(float);
  SoftmaxPart total;
  for (int rank = 0; rank < cluster_size(); ++rank) {
    SoftmaxPart part;
    part.max = cluster_read(kMax, rank);
    part.sum = cluster_read(kMax + 1, rank);
    part.weighted = cluster_read(kMax + 2, rank);
    total = combine(total, part);
  }
  return total;
}

// One row per cluster. All loads of a thread are issued before the first is used; the
// gradient is computed from the registers that hold them.
template <typename T, int kVectors, int kThreads, int kBlocks, bool kKept>
__global__ void __launch_bounds__(kThreads, kBlocks)
    visit_kernel(const LogitRows logits, const Selection selection, const TokenLossInputs in,
                 float scale, float inv_temperature, const Outputs out, const LogitRows grad) {
  const int rank = cluster_rank(), size = cluster_size();
  const int64_t r = blockIdx.x / static_cast<unsigned>(size);
  const int64_t lane = static_cast<int64_t>(rank) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(size) * kThreads;
  const T* row = reinterpret_cast<const T*>(logits.row(r));
  T* grad_row = reinterpret_cast<T*>(grad.row(r));
  const bool aligned = same_alignment(row, grad_row);
  const RowSplit<T> split(row, logits.vocab);
  if (!selection.has(r)) {  // in all blocks of the cluster
    zero_row<T>(grad_row, split, logits.vocab, lane, step, aligned);
    if (lane == 0) write_masked(r, out);
    return;
  }
  const KeptIds kept = kept_of<kKept>(selection, r);
  Vector v[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (lane + k * step < split.num_vectors) {
      const int64_t first = split.first_of(lane + k * step);
      v[k] = kept.is_full() ? load_vector_once(row + first) : load_kept_vector(row, first, kept);
    }
  }
  const int64_t single = split.single(lane, logits.vocab);
  const float single_x = single >= 0 ? load_logit(row, single, kept) : 0.0f;
  const int64_t target = selection.target_ids[r];
  // Before the cluster's barrier, after which another block may overwrite it.
  const float target_x = threadIdx.x == 0 ? target_logit(row, target, logits.vocab, kept) : 0.0f;

  SoftmaxPart part;
  for (int64_t i = lane; i < kept.size; i += step) {
    if (!is_valid_id(kept, i, logits.vocab)) part.sum = NAN;
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (lane + k * step < split.num_vectors) accumulate_vector<true, T>(v[k], scale, &part);
  }
  if (single >= 0) accumulate_single<true>(single_x, scale, &part);
  SharedState* shared = block_shared<SharedState>();
  part = block_combine<kThreads>(part, shared->warps);
  if (threadIdx.x == 0) shared->total = part;
  cluster_wait(cluster_arrive());
  if (threadIdx.x == 0) {
    shared->gradient =
        finish_row(cluster_total(), target_x, in, r, scale, inv_temperature, out, rank == 0);
  }
  __syncthreads();
  const ClusterTicket has_read = cluster_arrive();  // shared memory may be released when all have
  const GradTerms terms = shared->gradient.terms;
  const float target_d = shared->gradient.target;
  const auto at_target = [target_d](float) { return target_d; };
  if (terms.is_zero()) {
    zero_row<T>(grad_row, split, logits.vocab, lane, step, aligned);
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (lane + k * step < split.num_vectors) {
        store_vector_gradient<T>(v[k], terms, split.first_of(lane + k * step), target, scale,
                                 at_target, grad_row, aligned);
      }
    }
    if (single >= 0) {
      grad_row[single] =
          from_float<T>(single_gradient(terms, single_x, single, target, scale, at_target));
    }
  }
  cluster_wait(has_read);
}

// One row per block, read a second time for its gradient (from the L2 cache, if it is still there).
template <typename T, bool kKept>
__global__ void __launch_bounds__(kRevisitThreads, 2)
    revisit_kernel(const LogitRows logits, const Selection selection, const TokenLossInputs in,
                   float scale, float inv_temperature, const Outputs out, const LogitRows grad) {
  const int64_t r = blockIdx.x;
  const T* row = reinterpret_cast<const T*>(logits.row(r));
  T* grad_row = reinterpret_cast<T*>(grad.row(r));
  const bool aligned = same_alignment(row, grad_row);
  const RowSplit<T> split(row, logits.vocab);
  const int64_t lane = threadIdx.x;
  if (!selection.has(r)) {
    if (out.wants_grad) {
      zero_row<T>(grad_row, split, logits.vocab, lane, kRevisitThreads, aligned);
    }
    if (lane == 0) write_masked(r, out);
    return;
  }
  const int64_t target = selection.target_ids[r];
  const KeptIds kept = kept_of<kKept>(selection, r);
  const float target_x = lane == 0 ? target_logit(row, target, logits.vocab, kept) : 0.0f;
  SharedState* shared = block_shared<SharedState>();
  SoftmaxPart part;
  if (kept.is_full()) {
    part = row_part<true, T, kRevisitThreads, kRevisitLoads>(row, split, logits.vocab, scale);
  } else {
    part = kept_part<true, T, kRevisitThreads>(row, kept, logits.vocab, scale);
  }
  part = block_combine<kRevisitThreads>(part, shared->warps);
  if (lane == 0) {
    shared->gradient = finish_row(part, target_x, in, r, scale, inv_temperature, out, true);
  }
  if (!out.wants_grad) return;
  __syncthreads();
  const GradTerms terms = shared->gradient.terms;
  const float target_d = shared->gradient.target;
  const auto at_target = [target_d](float) { return target_d; };
  if (terms.is_zero()) {
    zero_row<T>(grad_row, split, logits.vocab, lane, kRevisitThreads, aligned);
    return;
  }
  for (int64_t base = lane; base < split.num_vectors; base += kRevisitThreads * kRevisitLoads) {
    Vector v[kRevisitLoads];
#pragma unroll
    for (int k = 0; k < kRevisitLoads; ++k) {
      const int64_t i = base + k * kRevisitThreads;
      if (i < split.num_vectors) {
        const int64_t first = split.first_of(i);
        v[k] = kept.is_full() ? load_vector(row + first) : load_kept_vector(row, first, kept);
      }
    }
#pragma unroll
    for (int k = 0; k < kRevisitLoads; ++k) {
      const int64_t i = base + k * kRevisitThreads;
      if (i < split.num_vectors) {
        store_vector_gradient<T>(v[k], terms, split.first_of(i), target, scale, at_target, grad_row,
                                 aligned);
      }
    }
  }
  const int64_t single = split.single(lane, logits.vocab);
  if (single >= 0) {
    grad_row[single] = from_float<T>(
        single_gradient(terms, load_logit(row, single, kept), single, target, scale, at_target));
  }
}

constexpr int kSmallVectors = 8, kLargeVectors = 16;
constexpr int kVisitThreads = 256, kWideThreads = 512;
constexpr int kMaxCluster = 8;  // supported by every device of compute capability 9 or higher

template <typename T, bool kKept>
auto kernel_of(const VisitPlan& plan) {
  constexpr int kBlocks = kKept ? 2 : 3;  // a set's bisection needs some registers more
  if (plan.vectors == kSmallVectors) {
    return visit_kernel<T, kSmallVectors, kVisitThreads, kBlocks, kKept>;
  }
  if (plan.vectors == kLargeVectors && plan.threads == kVisitThreads) {
    return visit_kernel<T, kLargeVectors, kVisitThreads, 2, kKept>;
  }
  if (plan.vectors == kLargeVectors) return visit_kernel<T, kLargeVectors, kWideThreads, 1, kKept>;
  return revisit_kernel<T, kKept>;
}

}  // namespace

int visit_code_major() { return code_major(revisit_kernel<float, false>); }

VisitPlan plan_visit(int64_t vocab, DType dtype, int code_major) {
  const int64_t per_vector = dtype == DType::kFloat32 ? 4 : 8;
  const int64_t num_vectors = vocab / per_vector;
  const int most = code_major >= 9 ? kMaxCluster : 1;
  for (int cluster = 1; cluster <= most; cluster *= 2) {
    if (num_vectors <= int64_t{kSmallVectors} * kVisitThreads * cluster) {
      return {kSmallVectors, kVisitThreads, cluster};
    }
  }
  for (const int threads : {kVisitThreads, kWideThreads}) {
    if (num_vectors <= int64_t{kLargeVectors} * threads * most) {
      return {kLargeVectors, threads, most};
    }
  }
  return {0, kRevisitThreads, 1};
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
  with_element(kOp, logits.dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const bool has_sets = selection.kept.ids != nullptr;
    const auto kernel = has_sets ? kernel_of<T, true>(plan) : kernel_of<T, false>(plan);
    launch(kOp, l, kernel, logits, selection, in,
           static_cast<float>(kLog2E / selection.temperature),
           static_cast<float>(1.0 / selection.temperature), out, grad != nullptr ? *grad : logits);
  });
}

}  // namespace skyrl_fast
