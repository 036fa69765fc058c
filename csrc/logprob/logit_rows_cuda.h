// A row of logits in kernels: how it splits into 16-byte vectors, and its softmax sums.
#pragma once

#include "core/cuda_device.h"
#include "core/element.h"
#include "logprob/logprob.h"
#include "logprob/online_softmax.h"

namespace skyrl_fast {

// Single elements up to a 16-byte boundary, vectors, single elements again. Fewer than kPerVector
// single elements on either side.
template <typename T>
struct RowSplit {
  static constexpr int kPerVector = kVectorBytes / static_cast<int>(sizeof(T));
  int64_t head, num_vectors, tail_begin;

  __device__ __forceinline__ RowSplit(const void* row, int64_t vocab) {
    const int64_t off =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kPerVector);
    head = off == 0 ? 0 : kPerVector - off;
    if (head > vocab) head = vocab;
    num_vectors = (vocab - head) / kPerVector;
    tail_begin = head + num_vectors * kPerVector;
  }
  __device__ __forceinline__ int64_t first_of(int64_t vector) const {
    return head + vector * kPerVector;
  }
  // The element that `lane` of at least 2 * kPerVector lanes handles in addition to the vectors, or
  // -1.
  __device__ __forceinline__ int64_t single(int64_t lane, int64_t vocab) const {
    if (lane < kPerVector) return lane < head ? lane : -1;
    const int64_t i = tail_begin + lane - kPerVector;
    return lane < 2 * kPerVector && i < vocab ? i : -1;
  }
};

// The elements of a vector. Indexed by constants alone, so that they stay in registers.
__device__ __forceinline__ void unpack(const Vector& v, float (&x)[4], const float*) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = float_of_bits(v.word[i]);
}
__device__ __forceinline__ void unpack(const Vector& v, float (&x)[8], const Bf16*) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = float_of_bits(v.word[i] << 16);
    x[2 * i + 1] = float_of_bits(v.word[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void unpack(const Vector& v, float (&x)[8], const Fp16*) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = to_float(Fp16{static_cast<uint16_t>(v.word[i] & 0xffffu)});
    x[2 * i + 1] = to_float(Fp16{static_cast<uint16_t>(v.word[i] >> 16)});
  }
}

__device__ __forceinline__ void pack(const float (&x)[4], Vector* v, const float*) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v->word[i] = bits_of_float(x[i]);
}
template <typename T>
__device__ __forceinline__ void pack(const float (&x)[8], Vector* v, const T*) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = from_float<T>(x[2 * i]).bits, high = from_float<T>(x[2 * i + 1]).bits;
    v->word[i] = low | high << 16;
  }
}

template <int kCount>
__device__ __forceinline__ float largest_of(const float (&x)[kCount]) {
  float largest = x[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) largest = larger(largest, x[i]);
  return largest;
}

template <bool kEntropy, typename T>
__device__ __forceinline__ void accumulate_vector(const Vector& v, float scale, SoftmaxPart* part) {
  float x[RowSplit<T>::kPerVector];
  unpack(v, x, static_cast<const T*>(nullptr));
  accumulate<kEntropy>(x, largest_of(x), scale, part);
}

template <bool kEntropy>
__device__ __forceinline__ void accumulate_single(float x, float scale, SoftmaxPart* part) {
  const float one[1] = {x};
  accumulate<kEntropy>(one, x, scale, part);
}

// The sums of the vectors first, first + kThreads, ... of a row, with kLoads loads in flight.
template <bool kEntropy, typename T, int kThreads, int kLoads>
__device__ __forceinline__ SoftmaxPart row_part(const T* row, const RowSplit<T>& split,
                                                int64_t vocab, float scale) {
  SoftmaxPart part;
  for (int64_t base = threadIdx.x; base < split.num_vectors; base += kThreads * kLoads) {
    Vector v[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (base + k * kThreads < split.num_vectors) {
        v[k] = load_vector_once(row + split.first_of(base + k * kThreads));
      }
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (base + k * kThreads < split.num_vectors) {
        accumulate_vector<kEntropy, T>(v[k], scale, &part);
      }
    }
  }
  const int64_t single = split.single(threadIdx.x, vocab);
  if (single >= 0) accumulate_single<kEntropy>(to_float(row[single]), scale, &part);
  return part;
}

// The kept ids of a row in a kernel that has any sets.
template <bool kKept>
__device__ __forceinline__ KeptIds kept_of(const Selection& selection, int64_t r) {
  return kKept ? selection.kept.of_row(r) : KeptIds();
}

// A logit, or -inf where it was not kept: its probability and gradient are 0, and it is not read.
template <typename T>
__device__ __forceinline__ float load_logit(const T* row, int64_t index, const KeptIds& kept) {
  return kept.is_full() || kept.find(index) >= 0 ? to_float(row[index]) : -INFINITY;
}

// The logit of the target; NaN where it is out of range or not kept.
template <typename T>
__device__ __forceinline__ float target_logit(const T* row, int64_t target, int64_t vocab,
                                              const KeptIds& kept) {
  const bool inside = target >= 0 && target < vocab;
  return inside && (kept.is_full() || kept.find(target) >= 0) ? to_float(row[target]) : NAN;
}

// A vector of a row with a set: each thread finds the kept ids in its vector.
template <typename T>
__device__ __forceinline__ Vector load_kept_vector(const T* row, int64_t first,
                                                   const KeptIds& kept) {
  float x[RowSplit<T>::kPerVector];
  int64_t place = kept.lower_bound(first);
#pragma unroll
  for (int i = 0; i < RowSplit<T>::kPerVector; ++i) {
    const bool is_kept = place < kept.size && kept.ids[place] == first + i;
    x[i] = is_kept ? to_float(row[first + i]) : -INFINITY;
    place += is_kept ? 1 : 0;
  }
  Vector v;
  pack(x, &v, row);
  return v;
}

// Whether the id at a place is in range and above the one before.
__device__ __forceinline__ bool is_valid_id(const KeptIds& kept, int64_t place, int64_t vocab) {
  const int32_t id = kept.ids[place];
  return id >= 0 && id < vocab && (place == 0 || kept.ids[place - 1] < id);
}

// The sums of the kept logits first, first + kThreads, ... of a row; NaN with an invalid id.
template <bool kEntropy, typename T, int kThreads>
__device__ __forceinline__ SoftmaxPart kept_part(const T* row, const KeptIds& kept, int64_t vocab,
                                                 float scale) {
  SoftmaxPart part;
  for (int64_t i = threadIdx.x; i < kept.size; i += kThreads) {
    const bool valid = is_valid_id(kept, i, vocab);
    accumulate_single<kEntropy>(valid ? to_float(row[kept.ids[i]]) : NAN, scale, &part);
  }
  return part;
}

__device__ __forceinline__ SoftmaxPart warp_combine(SoftmaxPart part) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    SoftmaxPart other;
    other.max = shuffle_xor(part.max, offset);
    other.sum = shuffle_xor(part.sum, offset);
    other.weighted = shuffle_xor(part.weighted, offset);
    part = combine(part, other);
  }
  return part;
}

// The block's sums, complete in thread 0 only. `slots`: kThreads / 32 parts of shared memory.
template <int kThreads>
__device__ __forceinline__ SoftmaxPart block_combine(SoftmaxPart part, SoftmaxPart* slots) {
  part = warp_combine(part);
  if (threadIdx.x % kWarp == 0) slots[threadIdx.x / kWarp] = part;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / kWarp; ++w) part = combine(part, slots[w]);
  }
  return part;
}

// Writes the gradient of one vector; grad rows may be aligned differently from the logits.
template <typename T>
__device__ __forceinline__ void store_gradient(T* grad, const float (&d)[RowSplit<T>::kPerVector],
                                               bool aligned) {
  if (aligned) {
    Vector out;
    pack(d, &out, static_cast<const T*>(nullptr));
    store_vector(grad, out);
  } else {
#pragma unroll
    for (int i = 0; i < RowSplit<T>::kPerVector; ++i) grad[i] = from_float<T>(d[i]);
  }
}

// `at_target(x)` is the gradient of the target, whose logit is x.
template <typename T, typename AtTarget>
__device__ __forceinline__ void store_vector_gradient(const Vector& v, const GradTerms& terms,
                                                      int64_t first, int64_t target, float scale,
                                                      const AtTarget& at_target, T* grad,
                                                      bool aligned) {
  constexpr int kCount = RowSplit<T>::kPerVector;
  float x[kCount], d[kCount];
  unpack(v, x, static_cast<const T*>(nullptr));
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = off_target_gradient(terms, x[i], scale);
  if (target >= first && target < first + kCount) {
    const int at = static_cast<int>(target - first);
    float target_x = x[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) target_x = i == at ? x[i] : target_x;
    const float target_d =
        at_target(target_x);  // computed once: inlining it per element is a lot of code
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[i] = i == at ? target_d : d[i];
  }
  store_gradient<T>(grad + first, d, aligned);
}

template <typename T>
__device__ __forceinline__ void store_zeros(T* grad, bool aligned) {
  const float d[RowSplit<T>::kPerVector] = {};
  store_gradient<T>(grad, d, aligned);
}

template <typename AtTarget>
__device__ __forceinline__ float single_gradient(const GradTerms& terms, float x, int64_t index,
                                                 int64_t target, float scale,
                                                 const AtTarget& at_target) {
  return index == target ? at_target(x) : off_target_gradient(terms, x, scale);
}

__device__ __forceinline__ bool same_alignment(const void* a, const void* b) {
  return reinterpret_cast<uintptr_t>(a) % kVectorBytes ==
         reinterpret_cast<uintptr_t>(b) % kVectorBytes;
}

// Calls fn(pointer to the element type of `dtype`).
template <typename Fn>
void with_element(const char* op, DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kFloat32: return fn(static_cast<float*>(nullptr));
    case DType::kFloat16: return fn(static_cast<Fp16*>(nullptr));
    case DType::kBFloat16: return fn(static_cast<Bf16*>(nullptr));
    default:
      throw std::invalid_argument(std::string(op) +
                                  ": logits must be float32, float16 or bfloat16, got " +
                                  dtype_name(dtype));
  }
}

}  // namespace skyrl_fast
