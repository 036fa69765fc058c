// Rows between flat and padded arrays. Every output byte is written once, by consecutive threads.
#include "core/cuda_device.h"
#include "pack/pack_cuda.h"

namespace skyrl_fast {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 4;
constexpr int64_t kBytesPerBlock = int64_t{kThreads} * kVectorsPerThread * kVectorBytes;
constexpr int64_t kMostBlocksPerRow = 1024;  // in longer rows a thread processes more vectors

// Calls fn(i) for the thread's units of `bytes` bytes: a strided loop over all blocks of grid y.
template <typename Unit, typename Fn>
__device__ __forceinline__ void for_units(int64_t bytes, const Fn& fn) {
  constexpr int64_t kUnit = sizeof(Unit);
  const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads * kUnit;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  for (int64_t i = first * kUnit; i < bytes; i += step) fn(i);
}

template <typename Unit>
__device__ __forceinline__ void copy_units(const char* from, char* to, int64_t bytes) {
  for_units<Unit>(bytes, [&](int64_t i) {
    *reinterpret_cast<Unit*>(to + i) = *reinterpret_cast<const Unit*>(from + i);
  });
}

__device__ __forceinline__ int common_alignment(const void* a, const void* b, int64_t bytes) {
  const uint64_t all = reinterpret_cast<uint64_t>(a) | reinterpret_cast<uint64_t>(b) |
                       static_cast<uint64_t>(bytes) | kVectorBytes;
  return static_cast<int>(all & (~all + 1));
}

__device__ __forceinline__ void copy_row(const char* from, char* to, int64_t bytes) {
  switch (common_alignment(from, to, bytes)) {
    case 16: return copy_units<Vector>(from, to, bytes);
    case 8: return copy_units<uint64_t>(from, to, bytes);
    case 4: return copy_units<uint32_t>(from, to, bytes);
    case 2: return copy_units<uint16_t>(from, to, bytes);
    default: return copy_units<uint8_t>(from, to, bytes);
  }
}

// In bytes; the row's padding is [begin, padded) and [padded + bytes, end).
struct MoveRow {
  int64_t flat, padded, bytes, begin, end;
};

__device__ __forceinline__ MoveRow move_row(const MoveJob& job, int64_t row) {
  MoveRow r;
  r.flat = job.cu[row] * job.cell_bytes;
  r.bytes = (job.cu[row + 1] - job.cu[row]) * job.cell_bytes;
  r.begin = row * job.width * job.cell_bytes;
  r.end = r.begin + job.width * job.cell_bytes;
  r.padded = r.begin + job.starts[row] * job.cell_bytes;
  return r;
}

__global__ void __launch_bounds__(kThreads)
    padded_to_flat_kernel(const MoveJob job, const char* padded, char* flat,
                          int64_t* position_ids) {
  const int64_t row = blockIdx.x;
  const MoveRow r = move_row(job, row);
  copy_row(padded + r.padded, flat + r.flat, r.bytes);
  const int64_t length = job.cu[row + 1] - job.cu[row];
  const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads;
  for (int64_t t = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; t < length;
       t += step) {
    position_ids[job.cu[row] + t] = t;
  }
}

struct Pattern {
  uint32_t word[4];
};

// Repeats the pattern from the first byte, which begins an element.
__device__ __forceinline__ void fill_row(char* to, const Pattern& pattern, int64_t bytes) {
  if (common_alignment(to, to, bytes) == kVectorBytes) {
    const Vector v = {{pattern.word[0], pattern.word[1], pattern.word[2], pattern.word[3]}};
    return for_units<Vector>(bytes, [&](int64_t i) { store_vector(to + i, v); });
  }
  for_units<char>(bytes, [&](int64_t i) {
    const int byte = static_cast<int>(i % kVectorBytes);
    const uint32_t chosen = byte < 4    ? pattern.word[0]
                            : byte < 8  ? pattern.word[1]
                            : byte < 12 ? pattern.word[2]
                                        : pattern.word[3];
    to[i] = static_cast<char>(chosen >> (byte % 4 * 8));
  });
}

__global__ void __launch_bounds__(kThreads)
    flat_to_padded_kernel(const MoveJob job, const char* flat, const Pattern pattern,
                          char* padded) {
  const int64_t row = blockIdx.x;
  const MoveRow r = move_row(job, row);
  copy_row(flat + r.flat, padded + r.padded, r.bytes);
  fill_row(padded + r.begin, pattern, r.padded - r.begin);
  fill_row(padded + r.padded + r.bytes, pattern, r.end - r.padded - r.bytes);
}

Launch move_launch(const MoveJob& job, int64_t most_bytes, cudaStream_t stream) {
  Launch l;
  l.grid_x = job.num_rows;
  const int64_t parts = (most_bytes + kBytesPerBlock - 1) / kBytesPerBlock;
  l.grid_y = parts == 0 ? 1 : parts < kMostBlocksPerRow ? parts : kMostBlocksPerRow;
  l.threads = kThreads;
  l.stream = stream;
  return l;
}

}  // namespace

void padded_to_flat_cuda(const MoveJob& job, const void* padded, void* flat, int64_t* position_ids,
                         cudaStream_t stream) {
  if (job.num_rows == 0) return;
  launch("padded_to_varlen", move_launch(job, job.width * job.cell_bytes, stream),
         padded_to_flat_kernel, job, static_cast<const char*>(padded), static_cast<char*>(flat),
         position_ids);
}

void flat_to_padded_cuda(const MoveJob& job, const void* flat, const uint32_t (&pattern)[4],
                         void* padded, cudaStream_t stream) {
  if (job.num_rows == 0 || job.width * job.cell_bytes == 0) return;
  Pattern p;
  for (int i = 0; i < 4; ++i) p.word[i] = pattern[i];
  launch("varlen_to_padded", move_launch(job, job.width * job.cell_bytes, stream),
         flat_to_padded_kernel, job, static_cast<const char*>(flat), p, static_cast<char*>(padded));
}

}  // namespace skyrl_fast
