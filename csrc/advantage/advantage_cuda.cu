// Group-wise advantages: scores of last rows, group statistics, advantages of all cells. Sums use
// the CPU's order and no fused multiply-adds, so that both give the same bits.
#include <cmath>

#include "advantage/advantage_cuda.h"
#include "core/cuda_device.h"

namespace skyrl_fast {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;  // partial sums of a row, as in cell_sum of row_layout.h
constexpr int kRowsPerBlock = kThreads / kLanes;

SKYRL_HD double plain_add(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

SKYRL_HD double plain_multiply(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// Sixteen threads per row. Lane l adds the cells l, l + 16, ...; then, with lanes a0..a3, b0..b3,
// c0..c3, d0..d3: s_i = (a_i + b_i) + (c_i + d_i), (s_0 + s_1) + (s_2 + s_3), and the last
// length % 16 cells one by one.
__global__ void __launch_bounds__(kThreads) score_kernel(const GroupAdvantageJob job) {
  double* sums = block_shared<double>();
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int slot = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + slot;
  const bool is_read =
      row < job.reward_rows.num_rows && (job.is_last_step == nullptr || job.is_last_step[row] != 0);
  const int64_t length = is_read ? job.reward_rows.length(row) : 0;
  const float* cells = job.rewards + (is_read ? job.reward_rows.offset(row) : 0);
  const int64_t full = length / kLanes * kLanes;
  double sum = 0.0;
  for (int64_t t = lane; t < full; t += kLanes) sum = plain_add(sum, cells[t]);
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (lane != 0 || row >= job.reward_rows.num_rows) return;
  const double* s = sums + slot * kLanes;
  double parts[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    parts[i] = plain_add(plain_add(s[i], s[4 + i]), plain_add(s[8 + i], s[12 + i]));
  }
  double total = plain_add(plain_add(parts[0], parts[1]), plain_add(parts[2], parts[3]));
  for (int64_t t = full; t < length; ++t) total = plain_add(total, cells[t]);
  job.scores[row] = total;
}

// One thread per sorted row; the first of each group computes its statistics, in row order.
__global__ void __launch_bounds__(kThreads) group_kernel(const GroupAdvantageJob job) {
  const int64_t n = job.num_sorted;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (first >= n) return;
  const int64_t id = job.sorted_ids[first];
  if (first > 0 && job.sorted_ids[first - 1] == id) return;
  const int64_t first_row = job.order[first];
  if (job.is_last_step != nullptr && job.is_last_step[first_row] == 0) return;
  int64_t end = first;
  double mean = 0.0;
  for (; end < n && job.sorted_ids[end] == id; ++end) {
    mean = plain_add(mean, job.scores[job.order[end]]);
  }
  const int64_t count = end - first;
  mean /= static_cast<double>(count);
  double squares = 0.0;
  for (int64_t i = first; i < end; ++i) {
    const double deviation = job.scores[job.order[i]] - mean;
    squares = plain_add(squares, plain_multiply(deviation, deviation));
  }
  const double std = count > 1 ? sqrt(squares / static_cast<double>(count - 1)) : 1.0;
  for (int64_t i = first; i < end; ++i) {
    const int64_t row = job.order[i];
    const double score = job.scores[row];
    const double advantage = advantage_of(job.estimator, score, mean, std, count);
    // A score that is not finite is an error on the CPU; here it makes its group NaN.
    job.row_advantage[row] = mean - mean == 0.0 ? static_cast<float>(advantage) : NAN;
  }
}

__device__ __forceinline__ float mask_at(const GroupAdvantageJob& job, int64_t cell) {
  switch (job.mask_type) {
    case MaskDType::kUInt8: return static_cast<float>(static_cast<const uint8_t*>(job.mask)[cell]);
    case MaskDType::kInt64:
      return static_cast<float>(static_cast<int32_t>(static_cast<const int64_t*>(job.mask)[cell]));
    case MaskDType::kFloat32: return static_cast<const float*>(job.mask)[cell];
    default: return 1.0f;
  }
}

// One warp per row: the trajectory's last row is the next one that is a last step.
__global__ void __launch_bounds__(kThreads) spread_kernel(const GroupAdvantageJob job) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int64_t n = job.out_rows.num_rows;
  if (row >= n) return;
  int64_t last = row;
  while (job.is_last_step != nullptr && last < n && job.is_last_step[last] == 0) ++last;
  const float advantage = last < n ? job.row_advantage[last] : NAN;
  const int64_t offset = job.out_rows.offset(row), length = job.out_rows.length(row);
  for (int64_t t = threadIdx.x % kWarp; t < length; t += kWarp) {
    job.out[offset + t] = advantage * mask_at(job, offset + t);
  }
}

}  // namespace

void group_advantage_cuda(const GroupAdvantageJob& job, cudaStream_t stream) {
  const int64_t n = job.out_rows.num_rows;
  if (n == 0) return;
  Launch l;
  l.threads = kThreads;
  l.stream = stream;
  l.grid_x = (n + kRowsPerBlock - 1) / kRowsPerBlock;
  l.shared_bytes = kThreads * static_cast<int>(sizeof(double));
  launch("group_advantage", l, score_kernel, job);
  l.shared_bytes = 0;
  if (job.num_sorted > 0) {
    l.grid_x = (job.num_sorted + kThreads - 1) / kThreads;
    launch("group_advantage", l, group_kernel, job);
  }
  l.grid_x = (n + kThreads / kWarp - 1) / (kThreads / kWarp);
  launch("group_advantage", l, spread_kernel, job);
}

}  // namespace skyrl_fast
