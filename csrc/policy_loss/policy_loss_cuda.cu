// Policy losses of cells: one launch computes gradients and partial sums, a second one adds these
// up.
#include "core/cuda_device.h"
#include "policy_loss/policy_loss_cuda.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "policy_loss";
constexpr int kThreads = 256;
constexpr int kCellsPerThread = static_cast<int>(kCellsPerSum) / kThreads;

__device__ __forceinline__ bool is_trained(const LossMask& mask, int64_t cell) {
  switch (mask.type) {
    case MaskType::kInt64: return static_cast<const int64_t*>(mask.data)[cell] != 0;
    case MaskType::kFloat32: return static_cast<const float*>(mask.data)[cell] != 0.0f;
    default: return static_cast<const uint8_t*>(mask.data)[cell] != 0;
  }
}

// The row of the cells of a block, which come in ascending order.
struct RowCursor {
  int64_t first;  // cell of the block
  int64_t row = 0;
  int end = 0;  // of the row, counted from `first`

  __device__ __forceinline__ explicit RowCursor(int64_t first_cell) : first(first_cell) {}
  __device__ __forceinline__ void move_to(const RowLayout& rows, int place) {
    if (place < end) return;
    const int64_t cell = first + place;
    int64_t row_end;
    if (rows.cu == nullptr) {
      row = cell / rows.width;
      row_end = (row + 1) * rows.width;
    } else {
      int64_t above = rows.num_rows;  // cu[row] <= cell < cu[above], past rows without cells
      while (above - row > 1) {
        const int64_t middle = row + (above - row) / 2;
        if (rows.cu[middle] <= cell) {
          row = middle;
        } else {
          above = middle;
        }
      }
      row_end = rows.cu[row + 1];
    }
    end = static_cast<int>(row_end - first < kCellsPerSum ? row_end - first : kCellsPerSum);
  }
};

// A thread's sums: counts in int, extremes in T, which LossSums has as double.
template <typename T>
struct CellSums {
  double policy = 0, ratio_minus_1 = 0, approx_kl = 0;
  double kl = 0, kl_weighted = 0, cross_entropy = 0, cross_entropy_weighted = 0;
  int tokens = 0, policy_tokens = 0, low = 0, high = 0, chosen = 0;
  int kl_tokens = 0, cross_entropy_tokens = 0;
  T ratio_max = T(0), ratio_min = T(INFINITY);

  __device__ __forceinline__ LossSums total() const {
    LossSums out;
    out.policy = policy;
    out.kl_weighted = kl_weighted;
    out.tokens = tokens;
    out.low = low;
    out.high = high;
    out.chosen = chosen;
    out.ratio_minus_1 = ratio_minus_1;
    out.approx_kl = approx_kl;
    out.kl = kl;
    out.policy_tokens = policy_tokens;
    out.kl_tokens = kl_tokens;
    out.cross_entropy = cross_entropy;
    out.cross_entropy_weighted = cross_entropy_weighted;
    out.cross_entropy_tokens = cross_entropy_tokens;
    out.ratio_max = ratio_max;
    out.ratio_min = ratio_min;
    return out;
  }
};

// What the policy stream reads of a cell.
template <typename T>
struct Cell {
  bool trained;
  T logprob, old_logprob, advantage;
};

template <typename T>
__device__ __forceinline__ void load_values(const PolicyLossInputs<T>& in, int64_t cell,
                                            Cell<T>* out) {
  out->logprob = in.logprobs[cell];
  out->old_logprob = in.old_logprobs != nullptr ? in.old_logprobs[cell] : out->logprob;
  out->advantage = in.advantages != nullptr ? in.advantages[cell] : T(0);
}

// Adds a cell of the policy stream to the sums and returns its gradient.
template <typename T>
__device__ __forceinline__ T visit_policy(LossKind loss, const LossParams<T>& params,
                                          const PolicyLossInputs<T>& in, const Cell<T>& values,
                                          int64_t cell, int64_t row, T row_weight, T token_weight,
                                          CellSums<T>* sums) {
  const T delta = loss == LossKind::kGspo ? static_cast<T>(in.sequence_delta[row])
                                          : values.logprob - values.old_logprob;
  const bool selects = loss == LossKind::kClipCov || loss == LossKind::kKlCov;
  const bool selected = selects && in.selected != nullptr && in.selected[cell] != 0;
  const TokenLoss<T> t = token_loss<T>(loss, params, values.logprob, values.old_logprob, delta,
                                       values.advantage, selected);
  T grad = T(0);
  if (token_weight != T(0)) {
    sums->policy += t.value * (row_weight * token_weight);
    grad = t.grad * (row_weight * token_weight);
  }
  sums->policy_tokens += 1;
  sums->low += t.clipped_low ? 1 : 0;
  sums->high += t.clipped_high ? 1 : 0;
  sums->chosen += t.chosen ? 1 : 0;
  sums->ratio_minus_1 += t.ratio_minus_1;
  sums->approx_kl += t.ratio_minus_1 - t.delta;
  if (t.ratio > sums->ratio_max) sums->ratio_max = t.ratio;  // false for NaN
  if (t.ratio < sums->ratio_min) sums->ratio_min = t.ratio;
  return grad;
}

// Adds a trained cell to the sums and returns its gradient. kAll: with the weights of the streams,
// the KL penalty and the cross-entropy.
template <bool kAll, typename T>
__device__ __forceinline__ T visit(LossKind loss, KlKind kl, const LossParams<T>& params,
                                   const PolicyLossInputs<T>& in, const Cell<T>& values,
                                   int64_t cell, int64_t row, CellSums<T>* sums) {
  const T row_weight = in.row_weights[row];
  sums->tokens += 1;
  if (!kAll) {
    return visit_policy<T>(loss, params, in, values, cell, row, row_weight, T(1), sums);
  }
  T grad = T(0);
  const T token_weight = in.token_weights != nullptr ? in.token_weights[cell] : T(1);
  if (in.cross_entropy_weights == nullptr || token_weight != T(0)) {
    grad = visit_policy<T>(loss, params, in, values, cell, row, row_weight, token_weight, sums);
  }
  const T kl_weight = in.kl_weights != nullptr ? in.kl_weights[cell] : T(1);
  if (kl != KlKind::kNone && kl_weight != T(0)) {
    const TokenKl<T> penalty = token_kl<T>(kl, values.logprob, in.reference[cell]);
    sums->kl += penalty.value;
    sums->kl_weighted +=
        static_cast<double>(row_weight) * static_cast<double>(kl_weight * penalty.value);
    sums->kl_tokens += 1;
    grad += row_weight * params.kl_coef * kl_weight * penalty.grad;
  }
  const T supervised = in.cross_entropy_weights != nullptr ? in.cross_entropy_weights[cell] : T(0);
  if (supervised != T(0)) {
    sums->cross_entropy -= values.logprob;
    sums->cross_entropy_weighted -=
        static_cast<double>(row_weight) * static_cast<double>(supervised * values.logprob);
    sums->cross_entropy_tokens += 1;
    grad -= row_weight * supervised;
  }
  return grad;
}

// The cells of a thread, kInFlight at a time: their loads are issued before the first is used.
template <bool kAll, int kInFlight, typename T>
__device__ __forceinline__ void visit_cells(LossKind loss, KlKind kl, const LossParams<T>& params,
                                            const PolicyLossInputs<T>& in, int64_t first,
                                            int num_cells, T* __restrict__ grad,
                                            CellSums<T>* sums) {
  RowCursor at(first);
#pragma unroll 1
  for (int begin = static_cast<int>(threadIdx.x); begin < num_cells;
       begin += kInFlight * kThreads) {
    Cell<T> values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int place = begin + k * kThreads;
      values[k].trained = place < num_cells && is_trained(in.mask, first + place);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (values[k].trained) load_values(in, first + begin + k * kThreads, &values[k]);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int place = begin + k * kThreads;
      T cell_grad = T(0);
      if (values[k].trained) {
        at.move_to(in.rows, place);
        cell_grad = visit<kAll, T>(loss, kl, params, in, values[k], first + place, at.row, sums);
      }
      if (grad != nullptr && place < num_cells) grad[first + place] = cell_grad;
    }
  }
}

// The sums of the block's threads, complete in thread 0 only, in a fixed order.
__device__ __forceinline__ LossSums block_total(const LossSums& mine) {
  LossSums* slots = block_shared<LossSums>();
  slots[threadIdx.x] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) add(slots[threadIdx.x + half], &slots[threadIdx.x]);
  }
  return slots[0];
}

// kLoss: known when it is compiled, so that a cell takes no branch for it; or kAnyLoss.
constexpr int kAnyLoss = -1;
// Blocks of a multiprocessor, which leave a thread 128 or 80 registers.
constexpr int blocks_for(int loss) { return loss == kAnyLoss ? 2 : 3; }

template <typename T, int kLoss>
__global__ void __launch_bounds__(kThreads, blocks_for(kLoss))
    loss_kernel(LossKind any, KlKind kl, const LossParams<T> params, const PolicyLossInputs<T> in,
                int64_t num_cells, T* __restrict__ grad, LossSums* __restrict__ partial) {
  constexpr int kInFlight = kLoss == kAnyLoss ? 1 : 4;
  const LossKind loss = kLoss == kAnyLoss ? any : static_cast<LossKind>(kLoss);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kCellsPerSum;
  const int64_t rest = num_cells - first;
  const int count = static_cast<int>(rest < kCellsPerSum ? rest : kCellsPerSum);
  CellSums<T> sums;
  if (kl == KlKind::kNone && in.token_weights == nullptr && in.cross_entropy_weights == nullptr) {
    visit_cells<false, kInFlight>(loss, kl, params, in, first, count, grad, &sums);
  } else {
    visit_cells<true, 1>(loss, kl, params, in, first, count, grad, &sums);
  }
  const LossSums total = block_total(sums.total());
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

auto loss_kernel_of(LossKind loss, float) {
  switch (loss) {
#define SKYRL_LOSS_KERNEL(name) \
  case LossKind::name: return &loss_kernel<float, static_cast<int>(LossKind::name)>;
    SKYRL_EACH_LOSS(SKYRL_LOSS_KERNEL)
#undef SKYRL_LOSS_KERNEL
  }
  throw std::invalid_argument(std::string(kOp) + ": no such loss");
}
auto loss_kernel_of(LossKind, double) { return &loss_kernel<double, kAnyLoss>; }  // is rare

// One block.
__global__ void __launch_bounds__(kThreads)
    fold_kernel(const LossSums* __restrict__ partial, int64_t num_partial, LossKind loss,
                double kl_coef, double* __restrict__ metrics) {
  LossSums sums;
  for (int64_t i = threadIdx.x; i < num_partial; i += kThreads) add(partial[i], &sums);
  const LossSums total = block_total(sums);
  if (threadIdx.x == 0) write_metrics(total, loss, kl_coef, metrics);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(T* __restrict__ cells, int64_t num_cells, const T* __restrict__ factor) {
  if (*factor == T(1)) return;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kCellsPerSum + threadIdx.x;
  for (int i = 0; i < kCellsPerThread; ++i) {
    const int64_t cell = begin + i * kThreads;
    if (cell < num_cells) cells[cell] *= *factor;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    kl_kernel(KlKind kl, const T* __restrict__ logprobs, const T* __restrict__ reference,
              const LossMask mask, const T* __restrict__ grad_out, int64_t num_cells,
              T* __restrict__ out) {
  const int64_t cell = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (cell >= num_cells) return;
  T value = T(0);
  if (is_trained(mask, cell)) {
    const TokenKl<T> penalty = token_kl<T>(kl, logprobs[cell], reference[cell]);
    value = grad_out != nullptr ? penalty.grad * grad_out[cell] : penalty.value;
  }
  out[cell] = value;
}

// One block per row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(const T* __restrict__ a, const T* __restrict__ b, const LossMask mask,
                 const RowLayout rows, double* __restrict__ sums) {
  const int64_t row = blockIdx.x;
  const int64_t begin = rows.cu != nullptr ? rows.cu[row] : row * rows.width;
  const int64_t end = rows.cu != nullptr ? rows.cu[row + 1] : begin + rows.width;
  LossSums mine;
  for (int64_t cell = begin + threadIdx.x; cell < end; cell += kThreads) {
    if (!is_trained(mask, cell)) continue;
    mine.kl += a[cell] - b[cell];
    mine.tokens += 1.0;
  }
  const LossSums total = block_total(mine);
  if (threadIdx.x == 0) {
    sums[2 * row] = total.kl;
    sums[2 * row + 1] = total.tokens;
  }
}

Launch of_blocks(int64_t num_blocks, cudaStream_t stream) {
  Launch l;
  l.grid_x = num_blocks;
  l.threads = kThreads;
  l.shared_bytes = kThreads * static_cast<int>(sizeof(LossSums));
  l.stream = stream;
  return l;
}

}  // namespace

template <typename T>
void policy_loss_cuda(LossKind loss, KlKind kl, const LossParams<T>& params,
                      const PolicyLossInputs<T>& in, int64_t num_cells, T* grad, LossSums* partial,
                      double* metrics, cudaStream_t stream) {
  const int64_t num_partial = (num_cells + kCellsPerSum - 1) / kCellsPerSum;
  if (num_partial > 0) {
    launch(kOp, of_blocks(num_partial, stream), loss_kernel_of(loss, T()), loss, kl, params, in,
           num_cells, grad, partial);
  }
  launch(kOp, of_blocks(1, stream), fold_kernel, partial, num_partial, loss,
         static_cast<double>(params.kl_coef), metrics);
}

template <typename T>
void scale_cells_cuda(T* cells, int64_t num_cells, const T* factor, cudaStream_t stream) {
  if (num_cells == 0) return;
  const int64_t num_blocks = (num_cells + kCellsPerSum - 1) / kCellsPerSum;
  Launch l = of_blocks(num_blocks, stream);
  l.shared_bytes = 0;
  launch(kOp, l, scale_kernel<T>, cells, num_cells, factor);
}

template <typename T>
void kl_penalty_cuda(KlKind kl, const T* logprobs, const T* reference, const LossMask& mask,
                     const T* grad_out, int64_t num_cells, T* out, cudaStream_t stream) {
  if (num_cells == 0) return;
  Launch l;
  l.grid_x = (num_cells + kThreads - 1) / kThreads;
  l.threads = kThreads;
  l.stream = stream;
  launch("kl_penalty", l, kl_kernel<T>, kl, logprobs, reference, mask, grad_out, num_cells, out);
}

template <typename T>
void delta_sums_cuda(const T* a, const T* b, const LossMask& mask, const RowLayout& rows,
                     double* sums, cudaStream_t stream) {
  if (rows.num_rows == 0) return;
  launch(kOp, of_blocks(rows.num_rows, stream), delta_kernel<T>, a, b, mask, rows, sums);
}

#define SKYRL_INSTANTIATE(T)                                                                       \
  template void policy_loss_cuda<T>(LossKind, KlKind, const LossParams<T>&,                        \
                                    const PolicyLossInputs<T>&, int64_t, T*, LossSums*, double*,   \
                                    cudaStream_t);                                                 \
  template void scale_cells_cuda<T>(T*, int64_t, const T*, cudaStream_t);                          \
  template void kl_penalty_cuda<T>(KlKind, const T*, const T*, const LossMask&, const T*, int64_t, \
                                   T*, cudaStream_t);                                              \
  template void delta_sums_cuda<T>(const T*, const T*, const LossMask&, const RowLayout&, double*, \
                                   cudaStream_t);
SKYRL_INSTANTIATE(float)
SKYRL_INSTANTIATE(double)
#undef SKYRL_INSTANTIATE

}  // namespace skyrl_fast
