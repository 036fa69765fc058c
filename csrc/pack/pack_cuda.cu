// Rows between flat and padded arrays. Every output byte is written once, in vectors of 16 bytes
// but for a row's ends; a warp has a part of a row.
#include "core/cuda_device.h"
#include "pack/pack_cuda.h"

namespace skyrl_fast {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;
constexpr int kInFlight = 4;  // vectors of a thread that are loaded before the first is stored
constexpr int kVectorsPerThread = 8;
constexpr int64_t kPartBytes = int64_t{kWarp} * kVectorsPerThread * kVectorBytes;
constexpr int64_t kMostParts = 1024;  // in longer rows a thread processes more vectors
constexpr int kWordBits = 32, kByteBits = 8, kWordBytes = 4;

// The thread's place among all that have a row.
struct Place {
  int64_t first, step;
};

__device__ __forceinline__ Place place_in_row() {
  const int64_t lane = static_cast<int64_t>(threadIdx.x) % kWarp;
  return {static_cast<int64_t>(blockIdx.y) * kWarp + lane, static_cast<int64_t>(gridDim.y) * kWarp};
}

// 16 of the 32 bytes of two vectors, from the byte `first`, which is below 16.
__device__ __forceinline__ Vector middle(const Vector& a, const Vector& b, int first) {
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = a.word[i];
    words[4 + i] = b.word[i];
  }
  const int word = first / kWordBytes;
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = (word & 2) != 0 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = (word & 1) != 0 ? words[i + 1] : words[i];
  const int bits = first % kWordBytes * kByteBits;
  Vector out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint64_t both = static_cast<uint64_t>(words[i + 1]) << kWordBits | words[i];
    out.word[i] = static_cast<uint32_t>(both >> bits);
  }
  return out;
}

__device__ __forceinline__ int bytes_past_boundary(const char* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) % kVectorBytes);
}
__device__ __forceinline__ int bytes_to_boundary(const char* p) {
  return (kVectorBytes - bytes_past_boundary(p)) % kVectorBytes;
}

// The bytes of a row in aligned vectors of its destination, and single ones at both ends.
struct Split {
  int64_t head, vectors, bytes;

  // `reads_two`: each vector's bytes are in two of the source, which are the row's own bytes.
  __device__ __forceinline__ Split(int64_t num_bytes, int64_t first, int past, bool reads_two)
      : head(first), bytes(num_bytes) {
    if (reads_two && head < past) head += kVectorBytes;
    const int64_t rest = bytes - head + (reads_two ? past - kVectorBytes : 0);
    vectors = rest > 0 ? rest / kVectorBytes : 0;
    if (vectors == 0) head = bytes;
  }

  // Calls fn(byte) for the thread's single bytes.
  template <typename Fn>
  __device__ __forceinline__ void for_ends(const Place& place, const Fn& fn) const {
    const int64_t body = vectors * kVectorBytes;
    for (int64_t i = place.first; i < bytes - body; i += place.step) fn(i < head ? i : i + body);
  }
};

// kTwo: the source's vectors do not begin where the destination's do.
template <bool kTwo>
__device__ __forceinline__ void copy_vectors(const char* __restrict__ from, char* __restrict__ to,
                                             int past, int64_t vectors, const Place& place) {
#pragma unroll 1
  for (int64_t i = place.first; i < vectors; i += kInFlight * place.step) {
    Vector v[kInFlight], next[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t at = i + k * place.step;
      if (at >= vectors) continue;
      const char* vector = from + at * kVectorBytes - (kTwo ? past : 0);
      v[k] = load_vector(vector);
      if (kTwo) next[k] = load_vector(vector + kVectorBytes);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t at = i + k * place.step;
      if (at < vectors)
        store_vector(to + at * kVectorBytes, kTwo ? middle(v[k], next[k], past) : v[k]);
    }
  }
}

__device__ __forceinline__ void copy_row(const char* __restrict__ from, char* __restrict__ to,
                                         int64_t bytes, const Place& place) {
  const int first = bytes_to_boundary(to);
  const int past = bytes_past_boundary(from + first);
  const Split split(bytes, first, past, past != 0);
  split.for_ends(place, [&](int64_t i) { to[i] = from[i]; });
  if (past == 0) {
    copy_vectors<false>(from + split.head, to + split.head, 0, split.vectors, place);
  } else {
    copy_vectors<true>(from + split.head, to + split.head, past, split.vectors, place);
  }
}

__device__ __forceinline__ int64_t row_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
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
    padded_to_flat_kernel(const MoveJob job, const char* __restrict__ padded,
                          char* __restrict__ flat, int64_t* __restrict__ position_ids) {
  const int64_t row = row_of_warp();
  if (row >= job.num_rows) return;
  const Place place = place_in_row();
  const MoveRow r = move_row(job, row);
  copy_row(padded + r.padded, flat + r.flat, r.bytes, place);
  const int64_t begin = job.cu[row], length = job.cu[row + 1] - begin;
  for (int64_t t = place.first; t < length; t += place.step) position_ids[begin + t] = t;
}

struct Pattern {
  Vector bytes;
};

// Repeats the pattern from the first byte, which begins an element.
__device__ __forceinline__ void fill_row(char* to, const Pattern& pattern, int64_t bytes,
                                         const Place& place) {
  const int first = bytes_to_boundary(to);
  const Split split(bytes, first, 0, false);
  split.for_ends(place, [&](int64_t i) {
    const int byte = static_cast<int>(i % kVectorBytes);
    const Vector rest = middle(pattern.bytes, pattern.bytes, byte);
    to[i] = static_cast<char>(rest.word[0]);
  });
  const Vector v = middle(pattern.bytes, pattern.bytes, first);
  for (int64_t i = place.first; i < split.vectors; i += place.step) {
    store_vector(to + split.head + i * kVectorBytes, v);
  }
}

__global__ void __launch_bounds__(kThreads)
    flat_to_padded_kernel(const MoveJob job, const char* __restrict__ flat, const Pattern pattern,
                          char* __restrict__ padded) {
  const int64_t row = row_of_warp();
  if (row >= job.num_rows) return;
  const Place place = place_in_row();
  const MoveRow r = move_row(job, row);
  copy_row(flat + r.flat, padded + r.padded, r.bytes, place);
  fill_row(padded + r.begin, pattern, r.padded - r.begin, place);
  fill_row(padded + r.padded + r.bytes, pattern, r.end - r.padded - r.bytes, place);
}

Launch move_launch(const MoveJob& job, cudaStream_t stream) {
  Launch l;
  l.grid_x = (job.num_rows + kRowsPerBlock - 1) / kRowsPerBlock;
  const int64_t parts = (job.width * job.cell_bytes + kPartBytes - 1) / kPartBytes;
  l.grid_y = parts == 0 ? 1 : parts < kMostParts ? parts : kMostParts;
  l.threads = kThreads;
  l.stream = stream;
  return l;
}

}  // namespace

void padded_to_flat_cuda(const MoveJob& job, const void* padded, void* flat, int64_t* position_ids,
                         cudaStream_t stream) {
  if (job.num_rows == 0) return;
  launch("padded_to_varlen", move_launch(job, stream), padded_to_flat_kernel, job,
         static_cast<const char*>(padded), static_cast<char*>(flat), position_ids);
}

void flat_to_padded_cuda(const MoveJob& job, const void* flat, const uint32_t (&pattern)[4],
                         void* padded, cudaStream_t stream) {
  if (job.num_rows == 0 || job.width * job.cell_bytes == 0) return;
  Pattern p;
  for (int i = 0; i < 4; ++i) p.bytes.word[i] = pattern[i];
  launch("varlen_to_padded", move_launch(job, stream), flat_to_padded_kernel, job,
         static_cast<const char*>(flat), p, static_cast<char*>(padded));
}

}  // namespace skyrl_fast
