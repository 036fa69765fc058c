// Cells of ragged or padded rows in chunks that stay in the first-level cache. For sources that are
// compiled once per SIMD level, which include it first.
//
// Everything has internal linkage, so that the linker cannot pick code compiled with extra
// instruction sets for a CPU that lacks them; hence also no <algorithm>.
#pragma once

#include "core/tensor.h"
#undef SKYRL_HD
#define SKYRL_HD static inline __attribute__((always_inline))
#include "policy_loss/policy_loss.h"

// The arrays of a loop do not overlap.
#if defined(__clang__)
#define SKYRL_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define SKYRL_NO_OVERLAP _Pragma("GCC ivdep")
#endif

namespace skyrl_fast {
namespace {

constexpr int64_t kChunk = 512;  // cells staged in the first-level cache
constexpr int kLanes = 16;

template <typename T>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Type = int32_t;
  static constexpr Type kMost = INT32_MAX;
};
template <>
struct BitsOf<double> {
  using Type = int64_t;
  static constexpr Type kMost = INT64_MAX;
};

// Largest and smallest ratio seen. Floats >= 0 are ordered like their bits, and extremes of
// integers vectorise. NaN is left out.
template <typename T>
struct Extremes {
  using Bits = typename BitsOf<T>::Type;
  Bits most = 0, least = BitsOf<T>::kMost;
};
template <typename T>
SKYRL_HD typename BitsOf<T>::Type bits_of(T x) {
  typename BitsOf<T>::Type bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
template <typename T>
SKYRL_HD T float_of(typename BitsOf<T>::Type bits) {
  T x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

template <typename T>
SKYRL_HD void fill(T* out, int64_t n, T value) {
  for (int64_t i = 0; i < n; ++i) out[i] = value;
}

// Lives are as wide as the floats used with them: bytes would make vectors of 64 cells and spill.
template <typename Mask, typename Live>
SKYRL_HD int64_t live_of(const Mask* __restrict__ mask, int64_t n, Live* __restrict__ live) {
  int32_t count = 0;
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    live[i] = mask[i] != Mask(0);
    count += static_cast<int32_t>(live[i]);
  }
  return count;
}

// live[0, n) = 1 where the cells [begin, begin + n) are trained; returns how many are.
template <typename Live>
SKYRL_HD int64_t read_mask(const LossMask& mask, int64_t begin, int64_t n, Live* live) {
  switch (mask.type) {
    case MaskType::kUInt8: return live_of(static_cast<const uint8_t*>(mask.data) + begin, n, live);
    case MaskType::kInt64: return live_of(static_cast<const int64_t*>(mask.data) + begin, n, live);
    case MaskType::kFloat32: break;
  }
  return live_of(static_cast<const float*>(mask.data) + begin, n, live);
}

static int64_t offset_of(const RowLayout& rows, int64_t row) {
  return rows.cu != nullptr ? rows.cu[row] : row * rows.width;
}

// The row that holds `cell`.
static int64_t row_of(const RowLayout& rows, int64_t cell) {
  if (rows.cu == nullptr) return cell / rows.width;
  int64_t low = 0, high = rows.num_rows;  // rows.cu[low] <= cell < rows.cu[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (rows.cu[middle] <= cell ? low : high) = middle;
  }
  return low;
}

// Calls fn(row, first cell, number of cells) for pieces of at most kChunk cells of one row each.
template <typename Fn>
SKYRL_HD void for_chunks(const RowLayout& rows, int64_t begin, int64_t end, const Fn& fn) {
  int64_t row = begin < end ? row_of(rows, begin) : 0;
  for (int64_t cell = begin; cell < end;) {
    const int64_t row_end = offset_of(rows, row + 1);
    if (cell >= row_end) {
      ++row;
      continue;
    }
    const int64_t stop = row_end < end ? row_end : end;
    const int64_t n = stop - cell < kChunk ? stop - cell : kChunk;
    fn(row, cell, n);
    cell += n;
  }
}

// Running sums in float64 over lanes, in element order.
struct Lanes {
  double sum[kLanes] = {};
};

// Adds x, padded with zeros to full vectors.
template <typename T>
SKYRL_HD void accumulate(T* x, int64_t n, Lanes* out) {
  for (; n % kLanes != 0; ++n) x[n] = T(0);
  Lanes lanes = *out;
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes.sum[j] += static_cast<double>(x[i + j]);
  }
  *out = lanes;
}

static double total(Lanes lanes) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int j = 0; j < step; ++j) lanes.sum[j] += lanes.sum[j + step];
  }
  return lanes.sum[0];
}

template <typename T>
SKYRL_HD double fold(T* x, int64_t n) {
  Lanes lanes;
  accumulate(x, n, &lanes);
  return total(lanes);
}

// Narrows [*begin, *end) by full vectors without a trained cell: padding is mostly on one side.
template <typename Live>
SKYRL_HD void trim(const Live* live, int64_t* begin, int64_t* end) {
  const auto none = [live](int64_t i) {
    Live any = 0;
    for (int j = 0; j < kLanes; ++j) any |= live[i + j];
    return any == 0;
  };
  while (*end - *begin >= kLanes && none(*begin)) *begin += kLanes;
  while (*end - *begin >= kLanes && none(*end - kLanes)) *end -= kLanes;
}

}  // namespace
}  // namespace skyrl_fast
