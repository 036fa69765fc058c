// Policy losses of cells: one launch computes gradients and partial sums, a second one adds these
// up.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/cuda_device.h"
#include "core/element.h"
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

__device__ __forceinline__ int64_t row_begin(const RowLayout& rows, int64_t row) {
  return rows.cu != nullptr ? rows.cu[row] : row * rows.width;
}

// The row of a cell, for all threads of a warp: each round leaves one part in 32 of the rows.
__device__ __forceinline__ int64_t find_row(const RowLayout& rows, int64_t cell) {
  const int64_t lane = static_cast<int64_t>(threadIdx.x) % kWarp;
  int64_t row = 0, above = rows.num_rows;  // row begins at or before the cell, `above` after it
  while (above - row > 1) {
    const int64_t step = (above - row + kWarp - 1) / kWarp;
    const int64_t at = row + lane * step;
    const int passed = count_in_warp(at < above && row_begin(rows, at) <= cell);
    row += passed > 0 ? (passed - 1) * step : 0;
    above = row + step < above ? row + step : above;
  }
  return row;
}

// What all cells of a row read.
template <typename T>
struct RowValues {
  T weight, sequence_delta;
};

// The row of a thread's cells, which come in ascending order.
template <typename T>
struct RowCursor {
  const PolicyLossInputs<T>& in;
  int64_t first;  // cell of the block
  int count;      // of the block's cells
  int64_t row;
  int end;  // of the row, counted from `first`
  RowValues<T> values;

  // Called by full warps.
  __device__ __forceinline__ RowCursor(const PolicyLossInputs<T>& inputs, int64_t first_cell,
                                       int num_cells)
      : in(inputs), first(first_cell), count(num_cells), row(find_row(inputs.rows, first_cell)) {
    read_row();
  }

  __device__ __forceinline__ void read_row() {
    const RowLayout& rows = in.rows;
    const int64_t row_end = row_begin(rows, row + 1);
    end = static_cast<int>(row_end - first < count ? row_end - first : count);
    values.weight = in.row_weights[row];
    values.sequence_delta = T(0);
    if (in.sequence_delta != nullptr)
      values.sequence_delta = static_cast<T>(in.sequence_delta[row]);
  }

  __device__ __forceinline__ void move_to(int place) {
    if (place < end) return;
    const RowLayout& rows = in.rows;
    const int64_t cell = first + place;
    // The next row is seldom far.
    int64_t step = 1;
    while (row + step < rows.num_rows && row_begin(rows, row + step) <= cell) {
      row += step;
      step *= 2;
    }
    int64_t above = row + step < rows.num_rows ? row + step : rows.num_rows;
    while (above - row > 1) {
      const int64_t middle = row + (above - row) / 2;
      if (row_begin(rows, middle) <= cell) {
        row = middle;
      } else {
        above = middle;
      }
    }
    read_row();
  }
};

constexpr uint32_t kHigh = 1u << 16;  // more than a thread has cells

// A thread's sums: counts in int, extremes in T, which LossSums has as double.
template <typename T>
struct CellSums {
  double policy = 0, ratio_minus_1 = 0, approx_kl = 0;
  double kl = 0, kl_weighted = 0, cross_entropy = 0, cross_entropy_weighted = 0;
  uint32_t clipped = 0;  // low ones, and kHigh for each high one
  int tokens = 0, policy_tokens = 0, chosen = 0;
  int kl_tokens = 0, cross_entropy_tokens = 0;
  T ratio_max = T(0), ratio_min = T(INFINITY);

  __device__ __forceinline__ LossSums total() const {
    LossSums out;
    out.policy = policy;
    out.kl_weighted = kl_weighted;
    out.tokens = tokens;
    out.low = clipped % kHigh;
    out.high = clipped / kHigh;
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

// The policy stream's sums of a few cells, which are then added in float64.
template <typename T>
struct PolicyTerms {
  T policy = 0, ratio_minus_1 = 0, approx_kl = 0;

  __device__ __forceinline__ void add_to(CellSums<T>* sums) const {
    sums->policy += policy;
    sums->ratio_minus_1 += ratio_minus_1;
    sums->approx_kl += approx_kl;
  }
};

// What the policy stream reads of a cell.
template <typename T>
struct Cell {
  T logprob, old_logprob, advantage;
};

// Adds a cell of the policy stream to the sums, but for the number of tokens; returns its gradient.
// Of a cell that is not trained it adds nothing, without a branch.
template <typename T>
__device__ __forceinline__ T visit_policy(LossKind loss, const LossParams<T>& params,
                                          const PolicyLossInputs<T>& in, const Cell<T>& values,
                                          int64_t cell, const RowValues<T>& row, T token_weight,
                                          bool trained, PolicyTerms<T>* terms, CellSums<T>* sums) {
  const T delta =
      loss == LossKind::kGspo ? row.sequence_delta : values.logprob - values.old_logprob;
  const bool selects = loss == LossKind::kClipCov || loss == LossKind::kKlCov;
  const bool selected = selects && trained && in.selected != nullptr && in.selected[cell] != 0;
  const TokenLoss<T> t = token_loss<T>(loss, params, values.logprob, values.old_logprob, delta,
                                       values.advantage, selected);
  const T weight = row.weight * token_weight;
  const bool is_weighted = trained && token_weight != T(0);
  terms->policy += is_weighted ? t.value * weight : T(0);
  terms->ratio_minus_1 += trained ? t.ratio_minus_1 : T(0);
  terms->approx_kl += trained ? t.ratio_minus_1 - t.delta : T(0);
  sums->clipped += (trained && t.clipped_low ? 1u : 0u) + (trained && t.clipped_high ? kHigh : 0u);
  sums->chosen += trained && t.chosen ? 1 : 0;
  if (trained) {
    sums->ratio_max = fmax(sums->ratio_max, t.ratio);  // NaN is left out
    sums->ratio_min = fmin(sums->ratio_min, t.ratio);
  }
  return is_weighted ? t.grad * weight : T(0);
}

// Adds a trained cell to the sums and returns its gradient: with the weights of the streams, the KL
// penalty and the cross-entropy.
template <typename T>
__device__ __forceinline__ T visit(LossKind loss, KlKind kl, const LossParams<T>& params,
                                   const PolicyLossInputs<T>& in, const Cell<T>& values,
                                   int64_t cell, const RowValues<T>& row, CellSums<T>* sums) {
  const T row_weight = row.weight;
  sums->tokens += 1;
  T grad = T(0);
  const T token_weight = in.token_weights != nullptr ? in.token_weights[cell] : T(1);
  if (in.cross_entropy_weights == nullptr || token_weight != T(0)) {
    PolicyTerms<T> terms;
    grad = visit_policy<T>(loss, params, in, values, cell, row, token_weight, true, &terms, sums);
    terms.add_to(sums);
    sums->policy_tokens += 1;
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

constexpr int kByteBits = 8;
__device__ __forceinline__ bool has_byte(uint32_t bytes, int k) {
  return (bytes >> (kByteBits * k) & 0xffu) != 0;
}

// The cells of a thread, one at a time, with all streams.
template <typename T>
__device__ __forceinline__ void visit_cells(LossKind loss, KlKind kl, const LossParams<T>& params,
                                            const PolicyLossInputs<T>& in, int64_t first,
                                            int num_cells, T* __restrict__ grad,
                                            CellSums<T>* sums) {
  RowCursor<T> at(in, first, num_cells);
#pragma unroll 1
  for (int place = static_cast<int>(threadIdx.x); place < num_cells; place += kThreads) {
    const int64_t cell = first + place;
    T cell_grad = T(0);
    if (is_trained(in.mask, cell)) {
      Cell<T> values;
      values.logprob = in.logprobs[cell];
      values.old_logprob = in.old_logprobs[cell];
      values.advantage = in.advantages != nullptr ? in.advantages[cell] : T(0);
      at.move_to(place);
      cell_grad = visit<T>(loss, kl, params, in, values, cell, at.values, sums);
    }
    if (grad != nullptr) grad[cell] = cell_grad;
  }
}

constexpr int kLoad = kVectorBytes / static_cast<int>(sizeof(float));  // cells of a thread's vector
constexpr int kLoads = 2;  // of each array, issued before the first is used
static_assert(kThreads * kLoad * kLoads == kCellsPerSum, "a pass of a block is a partial sum");

// Four cells of a thread in a block's arrays. Of vectors: consecutive cells, which are all the
// block's. Else cells kThreads apart, so that consecutive threads read consecutive ones.
template <bool kVector>
struct FourCells {
  float logprob[kLoad], old_logprob[kLoad], advantage[kLoad];

  static __device__ __forceinline__ int place(int begin, int k) {
    const int thread = static_cast<int>(threadIdx.x);
    return kVector ? begin + kLoad * thread + k : begin + thread + k * kThreads;
  }

  // Which are trained: a byte for each that is not 0.
  static __device__ __forceinline__ uint32_t trained(const LossMask& mask, int64_t first, int begin,
                                                     int num_cells) {
    if (begin >= num_cells) return 0;
    if constexpr (kVector) {
      const uint8_t* at = static_cast<const uint8_t*>(mask.data) + first;
      return *reinterpret_cast<const uint32_t*>(at + place(begin, 0));
    }
    uint32_t bytes = 0;
#pragma unroll
    for (int k = 0; k < kLoad; ++k) {
      const int at = place(begin, k);
      const bool is_one = at < num_cells && is_trained(mask, first + at);
      bytes |= (is_one ? 1u : 0u) << (kByteBits * k);
    }
    return bytes;
  }

  static __device__ __forceinline__ void load_four(const float* from, int begin, uint32_t trained,
                                                   float (&out)[kLoad]) {
    if constexpr (kVector) {
      const Vector v = load_vector(from + place(begin, 0));
#pragma unroll
      for (int k = 0; k < kLoad; ++k) out[k] = float_of_bits(v.word[k]);
    } else {
#pragma unroll
      for (int k = 0; k < kLoad; ++k) out[k] = has_byte(trained, k) ? from[place(begin, k)] : 0.0f;
    }
  }

  __device__ __forceinline__ void load(LossKind loss, const PolicyLossInputs<float>& in,
                                       int64_t first, int begin, uint32_t trained) {
    load_four(in.logprobs + first, begin, trained, logprob);
    load_four(in.old_logprobs + first, begin, trained, old_logprob);
    if (loss == LossKind::kCrossEntropy) return;
    load_four(in.advantages + first, begin, trained, advantage);
  }

  // Cells of one row take no branch; others a loop, so that its code is there once.
  static __device__ __forceinline__ void read_rows(int begin, int num_cells, RowCursor<float>* at,
                                                   RowValues<float> (&rows)[kLoad]) {
    const bool is_one_row = place(begin, kLoad - 1) < at->end;
#pragma unroll
    for (int k = 0; k < kLoad; ++k) rows[k] = at->values;
    if (is_one_row) return;
#pragma unroll 1
    for (int k = 0; k < kLoad; ++k) {
      if (place(begin, k) >= num_cells) return;
      at->move_to(place(begin, k));
#pragma unroll
      for (int other = 0; other < kLoad; ++other) {
        if (other == k) rows[other] = at->values;
      }
    }
  }

  static __device__ __forceinline__ void store(const float (&grad)[kLoad], float* to, int begin,
                                               int num_cells) {
    if constexpr (kVector) {
      const Vector v = {{bits_of_float(grad[0]), bits_of_float(grad[1]), bits_of_float(grad[2]),
                         bits_of_float(grad[3])}};
      store_vector(to + place(begin, 0), v);
    } else {
#pragma unroll
      for (int k = 0; k < kLoad; ++k) {
        if (place(begin, k) < num_cells) to[place(begin, k)] = grad[k];
      }
    }
  }
};

// The cells of a thread with the policy stream alone, four at a time: all loads of a pass are
// issued before the first is used, those of the next pass's masks before this one computes.
template <bool kVector>
__device__ __forceinline__ void visit_fours(LossKind loss, const LossParams<float>& params,
                                            const PolicyLossInputs<float>& in, int64_t first,
                                            int num_cells, float* __restrict__ grad,
                                            CellSums<float>* sums) {
  using Four = FourCells<kVector>;
  constexpr int kStride = kThreads * kLoad;
  uint32_t trained[kLoads];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    trained[j] = Four::trained(in.mask, first, j * kStride, num_cells);
  }
  RowCursor<float> at(in, first, num_cells);
#pragma unroll 1
  for (int begin = 0; begin < num_cells; begin += kLoads * kStride) {
    Four cells[kLoads];
    uint32_t next[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (trained[j] != 0) cells[j].load(loss, in, first, begin + j * kStride, trained[j]);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      next[j] = Four::trained(in.mask, first, begin + (kLoads + j) * kStride, num_cells);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      RowValues<float> rows[kLoad];
      Four::read_rows(begin + j * kStride, num_cells, &at, rows);
      PolicyTerms<float> terms;
      float of_cell[kLoad];
#pragma unroll
      for (int k = 0; k < kLoad; ++k) {
        const int64_t cell = first + Four::place(begin + j * kStride, k);
        const bool is_one = has_byte(trained[j], k);
        const Cell<float> values = {cells[j].logprob[k], cells[j].old_logprob[k],
                                    cells[j].advantage[k]};
        of_cell[k] = visit_policy<float>(loss, params, in, values, cell, rows[k], 1.0f, is_one,
                                         &terms, sums);
        sums->tokens += is_one ? 1 : 0;
      }
      terms.add_to(sums);
      if (grad != nullptr) Four::store(of_cell, grad + first, begin + j * kStride, num_cells);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) trained[j] = next[j];
  }
  sums->policy_tokens = sums->tokens;
}

// The join of a value's column in shared memory, in all of its kColumnThreads threads.
constexpr int kColumnThreads = 16;
template <typename Join>
__device__ __forceinline__ double join_column(const double* column, const Join& join) {
  double total = column[0];
#pragma unroll
  for (int i = 1; i < kThreads / kColumnThreads; ++i) {
    total = join(total, column[i * kColumnThreads]);
  }
  for (int lanes = kColumnThreads / 2; lanes > 0; lanes /= 2) {
    total = join(total, shuffle_xor(total, lanes));
  }
  return total;
}

// Writes the block's totals of its threads' values, in a fixed order: first kSums sums, then none
// or a maximum and a minimum. Threads write and read the shared memory without bank conflicts.
template <int kSums, int kValues>
__device__ __forceinline__ void write_block_totals(const double (&mine)[kValues], double* out) {
  constexpr int kPerWarp = kWarp / kColumnThreads;
  static_assert(kSums % kPerWarp == 0 && (kValues == kSums || kValues == kSums + kPerWarp),
                "a warp either adds or compares");
  double* slots = block_shared<double>();
#pragma unroll
  for (int v = 0; v < kValues; ++v) slots[v * kThreads + threadIdx.x] = mine[v];
  __syncthreads();
  const int value = static_cast<int>(threadIdx.x) / kColumnThreads;
  const int lane = static_cast<int>(threadIdx.x) % kColumnThreads;
  if (value >= kValues) return;
  const double* column = slots + value * kThreads + lane;
  double total;
  if (value < kSums) {
    total = join_column(column, [](double a, double b) { return a + b; });
  } else {
    const bool is_min = value > kSums;
    total = join_column(column, [is_min](double a, double b) { return is_min == a < b ? a : b; });
  }
  if (lane == 0) out[value] = total;
}

static_assert(offsetof(LossSums, ratio_max) == (kNumLossSums - 2) * sizeof(double) &&
                  offsetof(LossSums, ratio_min) == (kNumLossSums - 1) * sizeof(double),
              "the extremes come last");

__device__ __forceinline__ void write_block_total(const LossSums& mine, LossSums* out) {
  double values[kNumLossSums];
  std::memcpy(values, &mine, sizeof(values));
  write_block_totals<kNumLossSums - 2>(values, reinterpret_cast<double*>(out));
}

// kLoss: known when it is compiled, so that a cell takes no branch for it; or kAnyLoss.
constexpr int kAnyLoss = -1;
// Blocks of a multiprocessor, which leave a thread 128 or 80 registers; with 80 clip_cov and dppo's
// KL would spill some on sm_80 or sm_90.
constexpr int blocks_for(int loss) {
  const bool is_large = loss == static_cast<int>(LossKind::kClipCov) ||
                        loss == static_cast<int>(LossKind::kDppoKl) || loss == kAnyLoss;
  return is_large ? 2 : 3;
}

template <typename T, int kLoss>
__global__ void __launch_bounds__(kThreads, blocks_for(kLoss))
    loss_kernel(LossKind any, KlKind kl, const LossParams<T> params, const PolicyLossInputs<T> in,
                int64_t num_cells, int64_t cells_per_block, bool takes_vectors,
                T* __restrict__ grad, LossSums* __restrict__ partial) {
  const LossKind loss = kLoss == kAnyLoss ? any : static_cast<LossKind>(kLoss);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * cells_per_block;
  const int64_t rest = num_cells - first;
  const int count = static_cast<int>(rest < cells_per_block ? rest : cells_per_block);
  const bool has_streams =
      kl != KlKind::kNone || in.token_weights != nullptr || in.cross_entropy_weights != nullptr;
  CellSums<T> sums;
  if constexpr (kLoss == kAnyLoss) {
    visit_cells(loss, kl, params, in, first, count, grad, &sums);
  } else if (has_streams) {
    visit_cells(loss, kl, params, in, first, count, grad, &sums);
  } else if (takes_vectors && count == cells_per_block) {
    visit_fours<true>(loss, params, in, first, count, grad, &sums);
  } else {
    visit_fours<false>(loss, params, in, first, count, grad, &sums);
  }
  write_block_total(sums.total(), partial + blockIdx.x);
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
  LossSums* total = block_shared<LossSums>() + kThreads;
  write_block_total(sums, total);
  __syncthreads();
  if (threadIdx.x == 0) write_metrics(*total, loss, kl_coef, metrics);
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

constexpr int kDeltaSums = 2;  // of a row: its deltas and its trained tokens

// One block per row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(const T* __restrict__ a, const T* __restrict__ b, const LossMask mask,
                 const RowLayout rows, double* __restrict__ sums) {
  const int64_t row = blockIdx.x;
  const int64_t begin = rows.cu != nullptr ? rows.cu[row] : row * rows.width;
  const int64_t end = rows.cu != nullptr ? rows.cu[row + 1] : begin + rows.width;
  double delta = 0.0;
  int tokens = 0;
  for (int64_t cell = begin + threadIdx.x; cell < end; cell += kThreads) {
    if (!is_trained(mask, cell)) continue;
    delta += a[cell] - b[cell];
    tokens += 1;
  }
  const double mine[kDeltaSums] = {delta, static_cast<double>(tokens)};
  write_block_totals<kDeltaSums>(mine, sums + kDeltaSums * row);
}

Launch of_blocks(int64_t num_blocks, int num_values, cudaStream_t stream) {
  Launch l;
  l.grid_x = num_blocks;
  l.threads = kThreads;
  l.shared_bytes = num_values * static_cast<int>(sizeof(double));
  l.stream = stream;
  return l;
}

// Whether a thread's four cells are a vector in all arrays, with a mask of bytes.
template <typename T>
bool takes_vectors(const PolicyLossInputs<T>& in, const T* grad) {
  if (sizeof(T) * kLoad != kVectorBytes || in.mask.type != MaskType::kUInt8) return false;
  const T* arrays[] = {in.logprobs, in.old_logprobs, in.advantages, grad};
  uintptr_t all = 0;
  for (const T* array : arrays) {
    all |= reinterpret_cast<uintptr_t>(array);
  }
  return all % kVectorBytes == 0 && reinterpret_cast<uintptr_t>(in.mask.data) % kLoad == 0;
}

// A block that is one of many visits more cells: its sums are added up once.
int64_t sums_per_block(int64_t num_sums) {
  constexpr int64_t kManyBlocks = 1024, kMost = 4;
  return std::max<int64_t>(1, std::min(num_sums / kManyBlocks, kMost));
}

}  // namespace

template <typename T>
void policy_loss_cuda(LossKind loss, KlKind kl, const LossParams<T>& params,
                      const PolicyLossInputs<T>& inputs, int64_t num_cells, T* grad,
                      LossSums* partial, double* metrics, cudaStream_t stream) {
  PolicyLossInputs<T> in = inputs;
  if (in.old_logprobs == nullptr) in.old_logprobs = in.logprobs;
  const int64_t num_sums = (num_cells + kCellsPerSum - 1) / kCellsPerSum;
  const int64_t cells_per_block = kCellsPerSum * sums_per_block(num_sums);
  const int64_t num_blocks = (num_cells + cells_per_block - 1) / cells_per_block;
  constexpr int kValues = kThreads * kNumLossSums;
  if (num_blocks > 0) {
    launch(kOp, of_blocks(num_blocks, kValues, stream), loss_kernel_of(loss, T()), loss, kl, params,
           in, num_cells, cells_per_block, takes_vectors(in, grad), grad, partial);
  }
  launch(kOp, of_blocks(1, kValues + kNumLossSums, stream), fold_kernel, partial, num_blocks, loss,
         static_cast<double>(params.kl_coef), metrics);
}

template <typename T>
void scale_cells_cuda(T* cells, int64_t num_cells, const T* factor, cudaStream_t stream) {
  if (num_cells == 0) return;
  const int64_t num_blocks = (num_cells + kCellsPerSum - 1) / kCellsPerSum;
  launch(kOp, of_blocks(num_blocks, 0, stream), scale_kernel<T>, cells, num_cells, factor);
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
  launch(kOp, of_blocks(rows.num_rows, kDeltaSums * kThreads, stream), delta_kernel<T>, a, b, mask,
         rows, sums);
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
