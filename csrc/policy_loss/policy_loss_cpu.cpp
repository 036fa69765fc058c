// Policy losses on the CPU: blocks of cells on several threads, summed in a fixed order.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/parallel.h"
#include "core/simd.h"
#include "policy_loss/policy_loss.h"
#include "policy_loss/policy_loss_blocks.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kBlockCells = 1 << 15;  // cells of one partial sum; fixes the order of summation
constexpr int64_t kCellsPerThread = 1 << 17;  // below this a thread costs more than it saves

const BlockKernelSet& kernel_set() { return SKYRL_OF_SIMD_LEVEL(policy_loss_blocks); }

template <typename T>
const BlockKernels<T>& kernels() {
  if constexpr (std::is_same_v<T, float>) {
    return kernel_set().float32;
  } else {
    return policy_loss_blocks_float64();
  }
}

// Rows in parts of about kCellsPerThread cells or more.
int64_t rows_per_thread(const RowLayout& rows) {
  const int64_t mean_length = std::max<int64_t>(1, rows.offset(rows.num_rows) / rows.num_rows);
  return kCellsPerThread / mean_length + 1;
}

}  // namespace

template <typename T>
void policy_loss_cpu(LossKind loss, KlKind kl, const LossParams<T>& params,
                     const PolicyLossInputs<T>& in, T* grad, double* metrics, int num_threads) {
  const LossJob<T> job{loss, kl, params, in, grad};
  const int64_t num_cells = in.rows.num_rows > 0 ? in.rows.offset(in.rows.num_rows) : 0;
  const int64_t num_blocks = (num_cells + kBlockCells - 1) / kBlockCells;
  std::vector<LossSums> partial(num_blocks);
  const auto block = kernels<T>().loss;
  parallel_for(
      num_threads, num_blocks, kCellsPerThread / kBlockCells, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          block(job, b * kBlockCells, std::min(num_cells, (b + 1) * kBlockCells), &partial[b]);
        }
      });
  LossSums total;
  for (const LossSums& s : partial) add(s, &total);
  write_metrics(total, loss, static_cast<double>(params.kl_coef), metrics);
}

template <typename T>
void kl_penalty_cpu(KlKind kl, const T* logprobs, const T* reference, const LossMask& mask,
                    const T* grad_out, int64_t num_cells, T* out, int num_threads) {
  const KlJob<T> job{kl, logprobs, reference, mask, grad_out, out};
  const auto cells = kernels<T>().kl;
  parallel_for(num_threads, num_cells, kCellsPerThread,
               [&](int64_t begin, int64_t end) { cells(job, begin, end); });
}

void mask_counts_cpu(const LossMask& mask, const RowLayout& rows, int64_t* counts,
                     int num_threads) {
  if (rows.num_rows == 0) return;
  const auto count = kernel_set().counts;
  parallel_for(num_threads, rows.num_rows, rows_per_thread(rows),
               [&](int64_t begin, int64_t end) { count(mask, rows, begin, end, counts); });
}

template <typename T>
void delta_sums_cpu(const T* a, const T* b, const LossMask& mask, const RowLayout& rows,
                    double* sums, int num_threads) {
  if (rows.num_rows == 0) return;
  const DeltaJob<T> job{a, b, mask, rows};
  const auto some_rows = kernels<T>().delta;
  parallel_for(num_threads, rows.num_rows, rows_per_thread(rows),
               [&](int64_t begin, int64_t end) { some_rows(job, begin, end, sums); });
}

#define SKYRL_INSTANTIATE(T)                                                                      \
  template void policy_loss_cpu<T>(LossKind, KlKind, const LossParams<T>&,                        \
                                   const PolicyLossInputs<T>&, T*, double*, int);                 \
  template void kl_penalty_cpu<T>(KlKind, const T*, const T*, const LossMask&, const T*, int64_t, \
                                  T*, int);                                                       \
  template void delta_sums_cpu<T>(const T*, const T*, const LossMask&, const RowLayout&, double*, \
                                  int);
SKYRL_INSTANTIATE(float)
SKYRL_INSTANTIATE(double)
#undef SKYRL_INSTANTIATE

}  // namespace skyrl_fast
