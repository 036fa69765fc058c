// Group-wise advantages: scores of last rows, group statistics, advantages of all cells. Sums use
// the CPU's order and no fused multiply-adds, so that both give the same bits.
#include <cmath>

#include "advantage/advantage_cuda.h"
#include "core/cuda_device.h"
#include "core/element.h"

namespace skyrl_fast {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
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

// A lane's row of a group, or none.
struct Member {
  int64_t row = -1;
  double score = 0.0;  // which adds nothing to a sum

  __device__ __forceinline__ void read(const GroupAdvantageJob& job, int64_t first, int64_t end) {
    const int64_t at = first + threadIdx.x % kWarp;
    row = at < end ? job.order[at] : -1;
    score = row >= 0 ? job.scores[row] : 0.0;
  }
};

// The total and the values of the warp's first `count` lanes, or more whose values are 0, added one
// after the other.
__device__ __forceinline__ double add_lanes(double total, double value, int64_t count) {
  constexpr int kAtOnce = 8;  // shuffles of which the additions need not wait
#pragma unroll 1
  for (int lane = 0; lane < kWarp && lane < count; lane += kAtOnce) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) total = plain_add(total, shuffle(value, lane + k));
  }
  return total;
}

// One warp per sorted row; that of each group's first row computes the group's statistics, in row
// order, from 32 rows that its lanes read at once. Groups of more rows are read three times.
__global__ void __launch_bounds__(kThreads) group_kernel(const GroupAdvantageJob job) {
  const int64_t n = job.num_sorted;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (first >= n) return;
  const int64_t id = job.sorted_ids[first];
  if (first > 0 && job.sorted_ids[first - 1] == id) return;
  if (job.is_last_step != nullptr && job.is_last_step[job.order[first]] == 0) return;
  int64_t end = first;
  for (int same = kWarp; same == kWarp; end += same) {
    const int64_t at = end + threadIdx.x % kWarp;
    same = first_in_warp(at >= n || job.sorted_ids[at] != id);
  }
  const int64_t count = end - first;
  const bool is_long = count > kWarp;
  Member member;
  member.read(job, first, end);
  double mean = 0.0;
  for (int64_t at = first; at < end; at += kWarp) {
    if (at > first) member.read(job, at, end);
    mean = add_lanes(mean, member.score, end - at);
  }
  mean /= static_cast<double>(count);
  double squares = 0.0;
  for (int64_t at = first; at < end; at += kWarp) {
    if (is_long) member.read(job, at, end);
    const double deviation = member.row >= 0 ? member.score - mean : 0.0;
    squares = add_lanes(squares, plain_multiply(deviation, deviation), end - at);
  }
  const double std = count > 1 ? sqrt(squares / static_cast<double>(count - 1)) : 1.0;
  for (int64_t at = first; at < end; at += kWarp) {
    if (is_long) member.read(job, at, end);
    if (member.row < 0) continue;
    const double advantage = advantage_of(job.estimator, member.score, mean, std, count);
    // A score that is not finite is an error on the CPU; here it makes its group NaN.
    job.row_advantage[member.row] = mean - mean == 0.0 ? static_cast<float>(advantage) : NAN;
  }
}

// The row that is the last one of a row's trajectory: the next that is a last step, or num_rows.
// For all threads of a warp, which read 32 flags at once.
__device__ __forceinline__ int64_t last_row(const GroupAdvantageJob& job, int64_t row) {
  const int64_t n = job.out_rows.num_rows;
  if (job.is_last_step == nullptr) return row;
  for (int64_t first = row; first < n; first += kWarp) {
    const int64_t at = first + threadIdx.x % kWarp;
    const int found = first_in_warp(at < n && job.is_last_step[at] != 0);
    if (found < kWarp) return first + found;
  }
  return n;
}

constexpr int kCells = kVectorBytes / static_cast<int>(sizeof(float));  // of a thread's vector
constexpr int kInFlight = 4;  // vectors of a thread whose masks are read before one is written
constexpr int kVectors = 2 * kInFlight;  // of a thread
constexpr int64_t kPartCells = int64_t{kWarp} * kVectors * kCells;
constexpr int64_t kMostParts = 1024;  // in longer rows a thread has more vectors

template <typename Mask>
struct MaskCells {
  const Mask* __restrict__ cells;
  __device__ __forceinline__ float at(int64_t cell) const {
    // A CPU's mask of int64 is read as int32.
    if constexpr (sizeof(Mask) == sizeof(int64_t)) return static_cast<int32_t>(cells[cell]);
    return static_cast<float>(cells[cell]);
  }
};
struct NoMask {
  __device__ __forceinline__ float at(int64_t) const { return 1.0f; }
};

// out[i] = value * mask[i] for `length` cells of a row, by the threads `first`, first + step, ...
template <typename Cells>
__device__ __forceinline__ void spread(const Cells& mask, float value, int64_t length,
                                       int64_t first, int64_t step, float* __restrict__ out) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(out) / sizeof(float) % kCells;
  const int64_t to_boundary = static_cast<int64_t>((kCells - past) % kCells);
  const int64_t head = to_boundary < length ? to_boundary : length;
  const int64_t vectors = (length - head) / kCells, body = vectors * kCells;
  for (int64_t i = first; i < length - body; i += step) {
    const int64_t cell = i < head ? i : i + body;
    out[cell] = value * mask.at(cell);
  }
#pragma unroll 1
  for (int64_t i = first; i < vectors; i += kInFlight * step) {
    float factor[kInFlight][kCells];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t at = i + k * step;
#pragma unroll
      for (int c = 0; c < kCells; ++c) {
        if (at < vectors) factor[k][c] = mask.at(head + at * kCells + c);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t at = i + k * step;
      if (at >= vectors) continue;
      Vector v;
#pragma unroll
      for (int c = 0; c < kCells; ++c) v.word[c] = bits_of_float(value * factor[k][c]);
      store_vector(out + head + at * kCells, v);
    }
  }
}

// A warp per part of a row.
__global__ void __launch_bounds__(kThreads) spread_kernel(const GroupAdvantageJob job) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int64_t n = job.out_rows.num_rows;
  if (row >= n) return;
  const int64_t last = last_row(job, row);
  const float advantage = last < n ? job.row_advantage[last] : NAN;
  const int64_t offset = job.out_rows.offset(row), length = job.out_rows.length(row);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kWarp + threadIdx.x % kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kWarp;
  float* out = job.out + offset;
  switch (job.mask_type) {
    case MaskDType::kUInt8: {
      const MaskCells<uint8_t> mask = {static_cast<const uint8_t*>(job.mask) + offset};
      return spread(mask, advantage, length, first, step, out);
    }
    case MaskDType::kInt64: {
      const MaskCells<int64_t> mask = {static_cast<const int64_t*>(job.mask) + offset};
      return spread(mask, advantage, length, first, step, out);
    }
    case MaskDType::kFloat32: {
      const MaskCells<float> mask = {static_cast<const float*>(job.mask) + offset};
      return spread(mask, advantage, length, first, step, out);
    }
    default: return spread(NoMask(), advantage, length, first, step, out);
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
    l.grid_x = (job.num_sorted + kWarps - 1) / kWarps;
    launch("group_advantage", l, group_kernel, job);
  }
  l.grid_x = (n + kWarps - 1) / kWarps;
  // On the host nothing says how long the longest row is.
  const int64_t mean_cells = job.num_out / n;
  const int64_t parts = (mean_cells + kPartCells - 1) / kPartCells;
  l.grid_y = parts < 1 ? 1 : parts < kMostParts ? parts : kMostParts;
  launch("group_advantage", l, spread_kernel, job);
}

}  // namespace skyrl_fast
