// Selected log-probability and entropy: one read of each row forward, one more backward.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda.h"
#include "logprob_cuda.h"

namespace skyrl_fast {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kVectorBytes = 16;
constexpr int kLoadsInFlight = 4;  // 512 threads * 4 loads * 16 bytes = 32 KB per block
constexpr int kBackwardChunk = kThreads * kLoadsInFlight;  // vectors per block
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Online softmax in base 2: z = x * log2(e) / temperature; sum = Σ 2^(z - max),
// weighted = Σ (z - max) 2^(z - max).
struct Partial {
  float max, sum, weighted;
};

__device__ __forceinline__ Partial empty_partial() { return {-INFINITY, 0.f, 0.f}; }

// 0 * -inf and inf - inf must not arise from lanes that saw nothing.
__device__ __forceinline__ Partial combine(Partial a, Partial b) {
  const float m = fmaxf(a.max, b.max);
  if (m == -INFINITY) return {m, a.sum + b.sum, a.weighted + b.weighted};
  const float da = a.max - m, db = b.max - m;
  const float fa = exp2f(da), fb = exp2f(db);
  const float wa = a.sum > 0.f ? fa * (a.weighted + da * a.sum) : 0.f;
  const float wb = b.sum > 0.f ? fb * (b.weighted + db * b.sum) : 0.f;
  return {m, a.sum * fa + b.sum * fb, wa + wb};
}

template <int kCount>
__device__ __forceinline__ void accumulate(Partial& p, const float (&z)[kCount]) {
  float m = p.max;
#pragma unroll
  for (int i = 0; i < kCount; ++i) m = fmaxf(m, z[i]);
  if (m > p.max) p = combine(p, {m, 0.f, 0.f});
  if (m == -INFINITY) {  // only -inf and NaN so far
#pragma unroll
    for (int i = 0; i < kCount; ++i) p.sum += z[i] == -INFINITY ? 0.f : z[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float d = z[i] - m, e = exp2f(d);
    p.sum += e;
    p.weighted += e > 0.f ? d * e : 0.f;
  }
}

__device__ __forceinline__ Partial block_combine(Partial p) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    const Partial other = {__shfl_xor_sync(~0u, p.max, offset), __shfl_xor_sync(~0u, p.sum, offset),
                           __shfl_xor_sync(~0u, p.weighted, offset)};
    p = combine(p, other);
  }
  __shared__ Partial shared[kWarps];
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = p;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) p = combine(p, shared[w]);
  }
  return p;  // whole in thread 0
}

// How a row splits: single elements up to a 16-byte boundary, vectors, single elements again.
template <typename T>
struct RowSplit {
  static constexpr int kPerVector = kVectorBytes / sizeof(T);
  int64_t head, num_vectors, tail_begin;
  __device__ RowSplit(const T* row, int64_t vocab) {
    const int64_t off = (reinterpret_cast<uintptr_t>(row) / sizeof(T)) % kPerVector;
    head = min(off == 0 ? int64_t{0} : kPerVector - off, vocab);
    num_vectors = (vocab - head) / kPerVector;
    tail_begin = head + num_vectors * kPerVector;
  }
};

template <typename T>
union Vector {
  uint4 raw;
  T value[kVectorBytes / sizeof(T)];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ logits, int64_t vocab, int64_t row_stride,
                   const int64_t* __restrict__ targets, const uint8_t* __restrict__ mask,
                   float inv_temperature, float* __restrict__ logprob, double* __restrict__ lse,
                   float* __restrict__ entropy) {
  const int64_t row_index = blockIdx.x;
  if (mask != nullptr && mask[row_index] == 0) {
    if (threadIdx.x == 0) {
      logprob[row_index] = 0.f;
      lse[row_index] = 0.f;
      if (entropy != nullptr) entropy[row_index] = 0.f;
    }
    return;
  }
  const T* row = logits + row_index * row_stride;
  const RowSplit<T> split(row, vocab);
  const float scale = kLog2E * inv_temperature;
  constexpr int kPerVector = RowSplit<T>::kPerVector;
  Partial p = empty_partial();
  const uint4* vectors = reinterpret_cast<const uint4*>(row + split.head);
  for (int64_t base = threadIdx.x; base < split.num_vectors; base += kThreads * kLoadsInFlight) {
    Vector<T> v[kLoadsInFlight];
#pragma unroll
    for (int k = 0; k < kLoadsInFlight; ++k) {
      if (base + k * kThreads < split.num_vectors) v[k].raw = __ldcs(vectors + base + k * kThreads);
    }
#pragma unroll
    for (int k = 0; k < kLoadsInFlight; ++k) {
      if (base + k * kThreads >= split.num_vectors) break;
      float z[kPerVector];
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) z[i] = to_float(v[k].value[i]) * scale;
      accumulate(p, z);
    }
  }
  for (int64_t i = threadIdx.x; i < split.head; i += kThreads) {
    accumulate(p, {to_float(row[i]) * scale});
  }
  for (int64_t i = split.tail_begin + threadIdx.x; i < vocab; i += kThreads) {
    accumulate(p, {to_float(row[i]) * scale});
  }
  p = block_combine(p);
  if (threadIdx.x != 0) return;
  const int64_t target = targets[row_index];
  const bool in_range = target >= 0 && target < vocab;  // checked by the op; never read outside
  const float log2_sum = log2f(p.sum);
  const float log2_prob = (in_range ? to_float(row[target]) * scale : NAN) - p.max - log2_sum;
  logprob[row_index] = log2_prob * kLn2;
  lse[row_index] = (p.max + log2_sum) * kLn2;
  if (entropy != nullptr) entropy[row_index] = (log2_sum - p.weighted / p.sum) * kLn2;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* logits, int64_t vocab, int64_t row_stride,
                    const int64_t* __restrict__ targets, const uint8_t* __restrict__ mask,
                    float inv_temperature, const double* __restrict__ lse,
                    const float* __restrict__ entropy, const float* __restrict__ grad_logprob,
                    const float* __restrict__ grad_entropy, T* grad, int64_t grad_row_stride) {
  const int64_t row_index = blockIdx.x;
  const T* row = logits + row_index * row_stride;
  T* grad_row = grad + row_index * grad_row_stride;
  const bool trained = mask == nullptr || mask[row_index] != 0;
  const float g =
      trained && grad_logprob != nullptr ? grad_logprob[row_index] * inv_temperature : 0.f;
  const float ge =
      trained && grad_entropy != nullptr ? grad_entropy[row_index] * inv_temperature : 0.f;
  const float row_lse = static_cast<float>(lse[row_index]);
  const float row_entropy = entropy != nullptr ? entropy[row_index] : 0.f;
  const int64_t target = targets[row_index];
  const bool zero = g == 0.f && ge == 0.f;  // then the logits are not read

  auto element = [&](float x, int64_t index) {
    const float log_p = x * inv_temperature - row_lse;
    const float prob = exp2f(log_p * kLog2E);
    float d = -g * prob;
    if (index == target) d += g;
    if (ge != 0.f && prob > 0.f) d -= ge * prob * (log_p + row_entropy);
    return d;
  };
  // Vector stores need the gradient's row aligned like the logits' row.
  const bool same_alignment = (reinterpret_cast<uintptr_t>(row) % kVectorBytes) ==
                              (reinterpret_cast<uintptr_t>(grad_row) % kVectorBytes);
  constexpr int kPerVector = RowSplit<T>::kPerVector;
  const RowSplit<T> split(row, vocab);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kBackwardChunk;
  const int64_t last = min(first + kBackwardChunk, split.num_vectors);
  for (int64_t v = first + threadIdx.x; v < last; v += kThreads) {
    const int64_t index = split.head + v * kPerVector;
    Vector<T> in, out;
    if (!zero) in.raw = *reinterpret_cast<const uint4*>(row + index);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      out.value[i] = from_float<T>(zero ? 0.f : element(to_float(in.value[i]), index + i));
    }
    if (same_alignment) {
      *reinterpret_cast<uint4*>(grad_row + index) = out.raw;
    } else {
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) grad_row[index + i] = out.value[i];
    }
  }
  if (blockIdx.y != 0) return;
  auto single = [&](int64_t i) {
    grad_row[i] = from_float<T>(zero ? 0.f : element(to_float(row[i]), i));
  };
  for (int64_t i = threadIdx.x; i < split.head; i += kThreads) single(i);
  for (int64_t i = split.tail_begin + threadIdx.x; i < vocab; i += kThreads) single(i);
}

// Calls fn with a null pointer of the element type.
template <typename Fn>
void with_type(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kFloat32: return fn(static_cast<float*>(nullptr));
    case DType::kFloat16: return fn(static_cast<__half*>(nullptr));
    case DType::kBFloat16: return fn(static_cast<__nv_bfloat16*>(nullptr));
    default:
      throw std::invalid_argument(
          std::string("selected_logprob: logits must be float32, float16 or bfloat16, got ") +
          dtype_name(dtype));
  }
}

}  // namespace

void selected_logprob_cuda(const void* logits, DType dtype, int64_t num_rows, int64_t vocab,
                           int64_t row_stride, const int64_t* targets, const uint8_t* mask,
                           float temperature, float* logprob, double* lse, float* entropy,
                           cudaStream_t stream) {
  if (num_rows == 0) return;
  with_type(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    forward_kernel<T><<<static_cast<unsigned>(num_rows), kThreads, 0, stream>>>(
        static_cast<const T*>(logits), vocab, row_stride, targets, mask, 1.f / temperature, logprob,
        lse, entropy);
  });
  cuda_check(cudaGetLastError(), "selected_logprob");
}

void selected_logprob_backward_cuda(const void* logits, DType dtype, int64_t num_rows,
                                    int64_t vocab, int64_t row_stride, const int64_t* targets,
                                    const uint8_t* mask, float temperature, const double* lse,
                                    const float* entropy, const float* grad_logprob,
                                    const float* grad_entropy, void* grad, int64_t grad_row_stride,
                                    cudaStream_t stream) {
  if (num_rows == 0) return;
  with_type(dtype, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const int64_t vectors = vocab / RowSplit<T>::kPerVector + 1;
    const dim3 grid(static_cast<unsigned>(num_rows),
                    static_cast<unsigned>((vectors + kBackwardChunk - 1) / kBackwardChunk));
    backward_kernel<T><<<grid, kThreads, 0, stream>>>(
        static_cast<const T*>(logits), vocab, row_stride, targets, mask, 1.f / temperature, lse,
        entropy, grad_logprob, grad_entropy, static_cast<T*>(grad), grad_row_stride);
  });
  cuda_check(cudaGetLastError(), "selected_logprob backward");
}

}  // namespace skyrl_fast
