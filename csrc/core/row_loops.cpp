// The loops of row_loops.h. Compiled once per SIMD level; all else has internal linkage.
#include "core/row_loops.h"

#include <cstring>

#include "core/streaming.h"

namespace skyrl_fast {
namespace {

// Four floats, and the same four as doubles; compilers choose the registers.
constexpr int kLanes = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));

inline void add_doubles(const float* p, Doubles* sum) {
  Floats v;
  std::memcpy(&v, p, sizeof(v));  // rows start anywhere
  *sum += __builtin_convertvector(v, Doubles);
}

// Independent partial sums: one running sum would be a chain of dependent additions.
double sum(const float* cells, int64_t length) {
  Doubles a{}, b{}, c{}, d{};
  int64_t t = 0;
  for (; t + 4 * kLanes <= length; t += 4 * kLanes) {
    add_doubles(cells + t, &a);
    add_doubles(cells + t + kLanes, &b);
    add_doubles(cells + t + 2 * kLanes, &c);
    add_doubles(cells + t + 3 * kLanes, &d);
  }
  a = (a + b) + (c + d);
  double total = (a[0] + a[1]) + (a[2] + a[3]);
  for (; t < length; ++t) total += cells[t];
  return total;
}

inline float mask_value(int64_t m) { return static_cast<float>(static_cast<int32_t>(m)); }
inline float mask_value(uint8_t m) { return static_cast<float>(m); }
inline float mask_value(float m) { return m; }

// out[t] = cell(t), in full cache lines between a head and a tail: no line is written twice.
template <typename Cell>
inline void write(const Cell& cell, int64_t length, bool stream, float* __restrict__ out) {
  constexpr int64_t kCell = sizeof(float), kLine = kLineBytes / kCell;
  const int64_t head = bytes_to_line(out, length * kCell) / kCell;
  int64_t t = 0;
  for (; t < head; ++t) out[t] = cell(t);
  for (; stream && t + kLine <= length; t += kLine) {
    alignas(kLineBytes) float line[kLine];
    for (int64_t i = 0; i < kLine; ++i) line[i] = cell(t + i);
    stream_line(line, out + t);
  }
  for (; t < length; ++t) out[t] = cell(t);
}

void fill(float value, int64_t length, bool stream, float* out) {
  write([=](int64_t) { return value; }, length, stream, out);
}

template <typename Mask>
void times(float value, const Mask* __restrict__ mask, int64_t length, bool stream, float* out) {
  write([=](int64_t t) { return value * mask_value(mask[t]); }, length, stream, out);
}

const RowLoops kRowLoops = {sum, fill, times<uint8_t>, times<int64_t>, times<float>};

}  // namespace

#if defined(SKYRL_SIMD_AVX512)
const RowLoops& row_loops_avx512() { return kRowLoops; }
#elif defined(SKYRL_SIMD_AVX2)
const RowLoops& row_loops_avx2() { return kRowLoops; }
#else
const RowLoops& row_loops_baseline() { return kRowLoops; }
#endif

}  // namespace skyrl_fast
