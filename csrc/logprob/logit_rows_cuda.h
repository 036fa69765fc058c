// A row of logits in kernels: how it splits into 16-byte vectors, and its softmax sums.
#pragma once

#include "core/cuda_device.h"
#include "core/element.h"
#include "logprob/logprob.h"
#include "logprob/online_softmax.h"

namespace skyrl_fast {

// Single elements up to a 16-byte boundary, vectors, single elements again. Fewer than kPerVector
// single elements on either side. Rows have fewer than 2^31 logits: see with_element.
template <typename T>
struct RowSplit {
  static constexpr int kPerVector = kVectorBytes / static_cast<int>(sizeof(T));
  static constexpr int kSingles = 2 * kPerVector;  // lanes that handle a single element
  int head, num_vectors;

  __device__ __forceinline__ RowSplit(const void* row, int64_t vocab) {
    const int length = static_cast<int>(vocab);
    const int off = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kPerVector);
    head = off == 0 ? 0 : kPerVector - off;
    if (head > length) head = length;
    num_vectors = static_cast<int>(static_cast<unsigned>(length - head) / kPerVector);
  }
  __device__ __forceinline__ int first_of(int vector) const { return head + vector * kPerVector; }
  // The vector that holds an element, or -1.
  __device__ __forceinline__ int vector_of(int64_t element) const {
    const int64_t i = element - head;
    const int64_t vector = i / kPerVector;
    return i >= 0 && vector < num_vectors ? static_cast<int>(vector) : -1;
  }
  // The element that `lane` of at least kSingles lanes handles in addition to the vectors, or -1.
  __device__ __forceinline__ int single(int lane, int64_t vocab) const {
    if (lane < kPerVector) return lane < head ? lane : -1;
    const int i = first_of(num_vectors) + lane - kPerVector;
    return lane < kSingles && i < vocab ? i : -1;
  }
};

template <typename T>
__device__ __forceinline__ T* row_of(const LogitRows& rows, int64_t r) {
  return static_cast<T*>(rows.data) + rows.first_element(r);
}

// The elements of a vector. Indexed by constants alone, so that they stay in registers.
template <typename T>
__device__ __forceinline__ void unpack(const Vector& v, float (&x)[RowSplit<T>::kPerVector]) {
  constexpr int kPerWord = RowSplit<T>::kPerVector / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[kPerWord * i] = low_float(v.word[i], T());
    x[kPerWord * i + kPerWord - 1] = high_float(v.word[i], T());
  }
}

__device__ __forceinline__ void pack(const float (&x)[4], Vector* v, const float*) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v->word[i] = bits_of_float(x[i]);
}
template <typename T>
__device__ __forceinline__ void pack(const float (&x)[8], Vector* v, const T*) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v->word[i] = word_of(x[2 * i], x[2 * i + 1], T());
}

// Logits of -inf.
template <typename T>
__device__ __forceinline__ Vector empty_vector() {
  const uint32_t low = minus_infinity(T()), word = sizeof(T) == 2 ? low | low << 16 : low;
  return {{word, word, word, word}};
}

template <typename T, int kCount>
__device__ __forceinline__ float largest_of(const Vector (&v)[kCount]) {
  uint32_t word = v[0].word[0];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word = larger_words(word, v[k].word[i], T());
  }
  return larger(low_float(word, T()), high_float(word, T()));
}

// Adds kCount vectors: the maximum is raised once for all.
template <bool kEntropy, typename T, int kCount>
__device__ __forceinline__ void accumulate_vectors(const Vector (&v)[kCount], float scale,
                                                   SoftmaxPart* part) {
  raise_maximum<kEntropy>(larger(part->max, largest_of<T>(v) * scale), part);
  const float reference = part->reference();
  PairSums sums(*part);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    float x[RowSplit<T>::kPerVector];
    unpack<T>(v[k], x);
#pragma unroll
    for (int i = 0; i < RowSplit<T>::kPerVector; i += 2) {
      sums.accumulate<kEntropy>({x[i], x[i + 1]}, scale, reference);
    }
  }
  sums.write_to<kEntropy>(part);
}

template <bool kEntropy>
__device__ __forceinline__ void accumulate_single(float x, float scale, SoftmaxPart* part) {
  raise_maximum<kEntropy>(larger(part->max, x * scale), part);
  accumulate<kEntropy>(x, scale, part);
}

// The sums of the vectors first, first + kThreads, ... of a row, with kLoads loads in flight.
template <bool kEntropy, typename T, int kThreads, int kLoads>
__device__ __forceinline__ SoftmaxPart row_part(const T* row, const RowSplit<T>& split,
                                                int64_t vocab, float scale) {
  constexpr int kPerVector = RowSplit<T>::kPerVector;
  SoftmaxPart part;
  const T* vectors = row + split.head;
  int i = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (; i < split.num_vectors - (kLoads - 1) * kThreads; i += kThreads * kLoads) {
    Vector v[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      v[k] = load_vector_once(vectors + int64_t{i} * kPerVector + k * kThreads * kPerVector);
    }
    accumulate_vectors<kEntropy, T>(v, scale, &part);
  }
  if (i < split.num_vectors) {
    Vector v[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      v[k] = empty_vector<T>();
      if (i + k * kThreads < split.num_vectors) {
        v[k] = load_vector_once(vectors + int64_t{i} * kPerVector + k * kThreads * kPerVector);
      }
    }
    accumulate_vectors<kEntropy, T>(v, scale, &part);
  }
  const int single = split.single(static_cast<int>(threadIdx.x), vocab);
  if (single >= 0) accumulate_single<kEntropy>(to_float(row[single]), scale, &part);
  return part;
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

// The sums of the kept logits first, first + step, ... of a row; NaN with an invalid id.
template <bool kEntropy, typename T>
__device__ __forceinline__ SoftmaxPart kept_part(const T* row, const KeptIds& kept, int64_t vocab,
                                                 int64_t first, int64_t step, float scale) {
  SoftmaxPart part;
#pragma unroll 1
  for (int64_t i = first; i < kept.size; i += step) {
    const bool valid = is_valid_id(kept, i, vocab);
    accumulate_single<kEntropy>(valid ? to_float(row[kept.ids[i]]) : NAN, scale, &part);
  }
  return part;
}

// The sums of the parts of kLanes adjacent lanes of a full warp, with the same bits in each.
template <bool kEntropy, int kLanes>
__device__ __forceinline__ SoftmaxPart combine_lanes(SoftmaxPart part) {
  float max = part.max;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    max = larger(max, shuffle_xor(max, offset));
  }
  raise_maximum<kEntropy>(max, &part);
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    part.sum += shuffle_xor(part.sum, offset);
    if (kEntropy) part.weighted += shuffle_xor(part.weighted, offset);
  }
  return part;
}

// The block's sums, complete in the first warp only. `slots`: one part per warp, of kMostWarps at
// most, in shared memory.
template <bool kEntropy, int kMostWarps>
__device__ __forceinline__ SoftmaxPart combine_block(SoftmaxPart part, SoftmaxPart* slots) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  part = combine_lanes<kEntropy, kWarp>(part);
  if (threadIdx.x % kWarp == 0) slots[threadIdx.x / kWarp] = part;
  __syncthreads();
  if (threadIdx.x >= kWarp) return part;
  const int slot = static_cast<int>(threadIdx.x) % kMostWarps;
  return combine_lanes<kEntropy, kMostWarps>(slot < num_warps ? slots[slot] : SoftmaxPart());
}

// The gradient of the logits off the target.
template <bool kEntropy, typename T>
__device__ __forceinline__ Vector vector_gradient(const Vector& v, const GradTerms& terms,
                                                  float scale) {
  float x[RowSplit<T>::kPerVector];
  unpack<T>(v, x);
#pragma unroll
  for (int i = 0; i < RowSplit<T>::kPerVector; i += 2) {
    const FloatPair g = off_target_gradient<kEntropy>(terms, FloatPair{x[i], x[i + 1]}, scale);
    x[i] = g.first;
    x[i + 1] = g.second;
  }
  Vector out;
  pack(x, &out, static_cast<const T*>(nullptr));
  return out;
}

__device__ __forceinline__ bool same_alignment(const void* a, const void* b) {
  return reinterpret_cast<uintptr_t>(a) % kVectorBytes ==
         reinterpret_cast<uintptr_t>(b) % kVectorBytes;
}

// Zeros in the vectors first, first + step, ... below `end` of a row, and in its single elements.
template <typename T>
__device__ __forceinline__ void zero_row(T* grad, int64_t vocab, int first, int step, int end) {
  const RowSplit<T> split(grad, vocab);
  if (end > split.num_vectors) end = split.num_vectors;
#pragma unroll 1
  for (int64_t i = first; i < end; i += step) {
    store_vector(grad + split.head + i * RowSplit<T>::kPerVector, Vector());
  }
  const int single = split.single(first, vocab);
  if (single >= 0) grad[single] = from_float<T>(0.0f);
}

// What a thread needs to write its part of a row's gradient.
template <typename T>
struct GradientRow {
  const T* row;
  T* grad;  // may be `row`
  int64_t vocab, target;
  float scale;
};

// The gradient of the elements first, first + step, ... below `end`, one by one: for rows of logits
// and gradient that differ in alignment, and so in memory. `at_target(x)` is that of the target,
// whose logit is x.
template <bool kEntropy, typename T, typename AtTarget>
__device__ __forceinline__ void write_elements(const GradientRow<T>& at, const KeptIds& kept,
                                               const GradTerms& terms, const AtTarget& at_target,
                                               int64_t first, int64_t step, int64_t end) {
#pragma unroll 1
  for (int64_t i = first; i < end; i += step) {
    const float x = load_logit(at.row, i, kept);
    at.grad[i] = from_float<T>(i == at.target ? at_target(x)
                                              : off_target_gradient<kEntropy>(terms, x, at.scale));
  }
}

// That of a row with a set, for the vectors first, first + step, ... below `end`, but the target.
template <bool kEntropy, typename T>
__device__ __forceinline__ void write_kept_vectors(const GradientRow<T>& at,
                                                   const RowSplit<T>& split, const KeptIds& kept,
                                                   const GradTerms& terms, int first, int step,
                                                   int end) {
#pragma unroll 1
  for (int64_t i = first; i < end; i += step) {
    const int64_t element = split.head + i * RowSplit<T>::kPerVector;
    const Vector v = load_kept_vector(at.row, element, kept);
    store_vector(at.grad + element, vector_gradient<kEntropy, T>(v, terms, at.scale));
  }
}

// That of the vectors first, first + kThreads, ... below `end`, but the target, with kLoads loads
// in flight. A vector is loaded before it is written.
template <bool kEntropy, typename T, int kThreads, int kLoads>
__device__ __forceinline__ void write_vectors(const GradientRow<T>& at, const RowSplit<T>& split,
                                              const GradTerms& terms, int first, int end) {
  constexpr int kStride = kThreads * RowSplit<T>::kPerVector;
  int i = first;
#pragma unroll 1
  for (; i < end - (kLoads - 1) * kThreads; i += kThreads * kLoads) {
    const int64_t element = split.head + int64_t{i} * RowSplit<T>::kPerVector;
    Vector v[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) v[k] = load_vector(at.row + element + k * kStride);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      store_vector(at.grad + element + k * kStride,
                   vector_gradient<kEntropy, T>(v[k], terms, at.scale));
    }
  }
  const int64_t element = split.head + int64_t{i} * RowSplit<T>::kPerVector;
  Vector v[kLoads];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    if (i + k * kThreads < end) v[k] = load_vector(at.row + element + k * kStride);
  }
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    if (i + k * kThreads >= end) break;
    store_vector(at.grad + element + k * kStride,
                 vector_gradient<kEntropy, T>(v[k], terms, at.scale));
  }
}

// The gradient of a block's part of a row, the vectors `begin` to `end`, by kThreads threads; with
// the row's single elements where `with_singles` is set.
template <bool kEntropy, typename T, int kThreads, int kLoads, typename AtTarget>
__device__ __forceinline__ void write_gradient(const GradientRow<T>& at, const KeptIds& kept,
                                               const GradTerms& terms, const AtTarget& at_target,
                                               int begin, int end, bool with_singles) {
  const RowSplit<T> split(at.row, at.vocab);
  const int thread = static_cast<int>(threadIdx.x);
  if (end > split.num_vectors) end = split.num_vectors;
  // The target's element is written after its vector, by the same thread; read before it.
  const int target_vector = split.vector_of(at.target);
  const bool is_mine = target_vector >= begin && target_vector < end &&
                       (target_vector - begin) % static_cast<unsigned>(kThreads) == threadIdx.x;
  const float target_x = is_mine ? to_float(at.row[at.target]) : 0.0f;
  if (kept.is_full()) {
    write_vectors<kEntropy, T, kThreads, kLoads>(at, split, terms, begin + thread, end);
  } else {
    write_kept_vectors<kEntropy>(at, split, kept, terms, begin + thread, kThreads, end);
  }
  if (is_mine) at.grad[at.target] = from_float<T>(at_target(target_x));
  const int single = with_singles ? split.single(thread, at.vocab) : -1;
  if (single >= 0) {
    write_elements<kEntropy>(at, kept, terms, at_target, single, 1, int64_t{single} + 1);
  }
}

// Calls fn(pointer to the element type of `rows`).
template <typename Fn>
void with_element(const char* op, const LogitRows& rows, const Fn& fn) {
  constexpr int64_t kMostLogits = 0x7fffffff;  // of a row: vectors and elements are counted in int
  if (rows.vocab > kMostLogits) {
    throw std::invalid_argument(std::string(op) + ": a row must have fewer than 2^31 logits, got " +
                                std::to_string(rows.vocab));
  }
  switch (rows.dtype) {
    case DType::kFloat32: return fn(static_cast<float*>(nullptr));
    case DType::kFloat16: return fn(static_cast<Fp16*>(nullptr));
    case DType::kBFloat16: return fn(static_cast<Bf16*>(nullptr));
    default:
      throw std::invalid_argument(std::string(op) +
                                  ": logits: expected float32, float16 or bfloat16, got " +
                                  dtype_name(rows.dtype));
  }
}

}  // namespace skyrl_fast
