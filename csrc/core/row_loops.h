// Loops over the cells of one row, one set per SIMD level.
#pragma once

#include <cstdint>

namespace skyrl_fast {

// Masks are 0/1 (or small weights): 32 bits hold them, and convert in vectors where 64 do not.
// `stream`: write past the caches, as streaming.h does, to be followed by its `end_streaming`.
struct RowLoops {
  template <typename Mask>
  using Times = void (*)(float value, const Mask* mask, int64_t length, bool stream, float* out);

  // Partial sums in lanes whose number does not depend on the level, added in a fixed order.
  double (*sum)(const float* cells, int64_t length);
  // out[t] = value.
  void (*fill)(float value, int64_t length, bool stream, float* out);
  // out[t] = value * mask[t].
  Times<uint8_t> times_uint8;
  Times<int64_t> times_int64;
  Times<float> times_float;

  Times<uint8_t> times(const uint8_t*) const { return times_uint8; }
  Times<int64_t> times(const int64_t*) const { return times_int64; }
  Times<float> times(const float*) const { return times_float; }
};

// The set of the active SIMD level.
const RowLoops& row_loops();

const RowLoops& row_loops_baseline();
const RowLoops& row_loops_avx2();
const RowLoops& row_loops_avx512();

}  // namespace skyrl_fast
