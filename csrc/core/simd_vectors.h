// Vectors of floats for one SIMD level. Included only by sources that are compiled once per level:
// everything here has internal linkage, so that no code made with extra instruction sets can be
// picked by the linker for a CPU that lacks them.
//
//   Vec            kLanes floats
//   load2/store2   2 * kLanes consecutive elements as two vectors. Which element lands in which
//                  lane depends on the level; load2 and store2 agree on it.
//   BitVec         the lanes as signed integers. Of floats from -126 to -0 these are at most those
//                  of -126; of all others (+0, NaN, infinities too) they are larger
//   exp2_normal    2^y for kMinExponent <= y <= 1, NaN for NaN, by a polynomial of degree 3 to 5;
//                  2^0 is 1 exactly
//   exp2_or_zero   the same for any y <= 1: what is no normal float may be given as 0
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(SKYRL_SIMD_AVX512) || defined(SKYRL_SIMD_AVX2)
#include <immintrin.h>
#endif

namespace skyrl_fast {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr float kMinExponent = -126.0f;            // below it 2^y is no normal float
constexpr int32_t kMinExponentBits = -0x3d040000;  // its bits, 0xc2fc0000

#define SKYRL_INLINE static inline __attribute__((always_inline))

SKYRL_INLINE float float_of_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
SKYRL_INLINE uint32_t bits_of_float(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

SKYRL_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // 2^112 moves the exponent bias from 15 to 127, and makes subnormals normal.
  const float value = float_of_bits(magnitude << 13) * 0x1p112f;
  return float_of_bits(sign | bits_of_float(value));
}

SKYRL_INLINE uint16_t float_to_half(float value) {  // to nearest, ties to even
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // over 65519
  if (magnitude < 0x38800000) {  // subnormal half: the float addition rounds at bit 2^-24
    const float shifted = float_of_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of_float(shifted) - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

SKYRL_INLINE uint16_t float_to_bfloat16(float value) {  // to nearest, ties away from zero
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x8000) >> 16);
}

SKYRL_INLINE float to_float(float x) { return x; }
SKYRL_INLINE float to_float(BFloat16 x) {
  return float_of_bits(static_cast<uint32_t>(x.bits) << 16);
}
SKYRL_INLINE float to_float(Float16 x) { return half_to_float(x.bits); }
SKYRL_INLINE void from_float(float value, float* out) { *out = value; }
SKYRL_INLINE void from_float(float value, BFloat16* out) { out->bits = float_to_bfloat16(value); }
SKYRL_INLINE void from_float(float value, Float16* out) { out->bits = float_to_half(value); }

#if defined(SKYRL_SIMD_AVX512)

constexpr int kLanes = 16;
constexpr int kGroupPairs = 4;  // pairs of vectors held in registers at once
using Vec = __m512;

// 2^f for 0 <= f < 1 by degree: minimax among those with 2^0 = 1. Relative errors 1e-4,
// 3e-6, 1.5e-7.
constexpr float kExp2[6][6] = {
    {},
    {},
    {},
    {1.0f, 0.695116758f, 0.227645174f, 0.077066876f},
    {1.0f, 0.693044841f, 0.241280198f, 0.0522424802f, 0.0134266801f},
    {1.0f, 0.693151295f, 0.240164444f, 0.0557999127f, 0.00901703257f, 0.001867129f},
};

SKYRL_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
SKYRL_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
SKYRL_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
SKYRL_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
SKYRL_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
SKYRL_INLINE bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
using BitVec = __m512i;
SKYRL_INLINE BitVec bits(Vec v) { return _mm512_castps_si512(v); }
SKYRL_INLINE BitVec max_bits(BitVec a, BitVec b) { return _mm512_max_epi32(a, b); }
SKYRL_INLINE bool any_outside(BitVec v) {
  return _mm512_cmpgt_epi32_mask(v, _mm512_set1_epi32(kMinExponentBits)) != 0;
}
SKYRL_INLINE double sum_lanes(Vec v) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
  return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}
SKYRL_INLINE void store_lanes(float* p, Vec v) { _mm512_storeu_ps(p, v); }

template <int kDegree>
SKYRL_INLINE Vec exp2_normal(Vec y) {
  const Vec f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // y - floor(y)
  Vec p = fma(set1(kExp2[kDegree][kDegree]), f, set1(kExp2[kDegree][kDegree - 1]));
  for (int k = kDegree - 2; k >= 0; --k) p = fma(p, f, set1(kExp2[kDegree][k]));
  return _mm512_scalef_ps(p, y);  // p * 2^floor(y)
}
template <int kDegree>
SKYRL_INLINE void exp2_normal2(Vec y0, Vec y1, Vec* e0, Vec* e1) {
  *e0 = exp2_normal<kDegree>(y0);
  *e1 = exp2_normal<kDegree>(y1);
}
// The instructions give 0 for -inf, and subnormals, by themselves.
template <int kDegree>
SKYRL_INLINE Vec exp2_or_zero(Vec y) {
  return exp2_normal<kDegree>(y);
}

SKYRL_INLINE void load2(const float* p, Vec* a, Vec* b) {
  *a = _mm512_loadu_ps(p);
  *b = _mm512_loadu_ps(p + kLanes);
}
SKYRL_INLINE void store2(float* p, Vec a, Vec b) {
  _mm512_storeu_ps(p, a);
  _mm512_storeu_ps(p + kLanes, b);
}
// One load; even elements in a, odd elements in b: a bfloat16 is the upper half of a float.
SKYRL_INLINE void load2(const BFloat16* p, Vec* a, Vec* b) {
  const __m512i both = _mm512_loadu_si512(p);
  *a = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  *b = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-65536)));
}
// In the upper halves. To nearest; ties round away from zero, which saves three instructions.
SKYRL_INLINE __m512i round_to_bfloat16(Vec v) {
  return _mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x8000));
}
SKYRL_INLINE void store2(BFloat16* p, Vec a, Vec b) {
  const __m512i even = _mm512_srli_epi32(round_to_bfloat16(a), 16);
  _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaau, even, round_to_bfloat16(b)));
}
SKYRL_INLINE void load2(const Float16* p, Vec* a, Vec* b) {
  *a = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  *b = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + kLanes)));
}
SKYRL_INLINE void store2(Float16* p, Vec a, Vec b) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, kNearest));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + kLanes), _mm512_cvtps_ph(b, kNearest));
}

#elif defined(SKYRL_SIMD_AVX2)

constexpr int kLanes = 8;
constexpr int kGroupPairs = 2;
using Vec = __m256;

SKYRL_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
SKYRL_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
SKYRL_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
SKYRL_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
SKYRL_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
SKYRL_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b where either is NaN
SKYRL_INLINE bool any_greater(Vec a, Vec b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
}
using BitVec = __m256i;
SKYRL_INLINE BitVec bits(Vec v) { return _mm256_castps_si256(v); }
SKYRL_INLINE BitVec max_bits(BitVec a, BitVec b) { return _mm256_max_epi32(a, b); }
SKYRL_INLINE bool any_outside(BitVec v) {
  const __m256i outside = _mm256_cmpgt_epi32(v, _mm256_set1_epi32(kMinExponentBits));
  return _mm256_movemask_ps(_mm256_castsi256_ps(outside)) != 0;
}
SKYRL_INLINE Vec zero_where_less(Vec value, Vec a, Vec b) {
  return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), value);
}
SKYRL_INLINE double sum_lanes(Vec v) {
  const __m256d sum = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)),
                                    _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
  double lanes[4];
  _mm256_storeu_pd(lanes, sum);
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}
SKYRL_INLINE void store_lanes(float* p, Vec v) { _mm256_storeu_ps(p, v); }
// p * 2^n, where the low bits of `shifted` = n + kShift hold n.
SKYRL_INLINE Vec scale_by_low_bits(Vec p, Vec shifted) {
  const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n));
}

SKYRL_INLINE void load2(const float* p, Vec* a, Vec* b) {
  *a = _mm256_loadu_ps(p);
  *b = _mm256_loadu_ps(p + kLanes);
}
SKYRL_INLINE void store2(float* p, Vec a, Vec b) {
  _mm256_storeu_ps(p, a);
  _mm256_storeu_ps(p + kLanes, b);
}
// One load; even elements in a, odd elements in b: a bfloat16 is the upper half of a float.
SKYRL_INLINE void load2(const BFloat16* p, Vec* a, Vec* b) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  *a = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  *b = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(-65536)));
}
// In the upper halves. To nearest; ties round away from zero, which saves three instructions.
SKYRL_INLINE __m256i round_to_bfloat16(Vec v) {
  return _mm256_add_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(0x8000));
}
SKYRL_INLINE void store2(BFloat16* p, Vec a, Vec b) {
  const __m256i even = _mm256_srli_epi32(round_to_bfloat16(a), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_blend_epi16(even, round_to_bfloat16(b), 0xaa));
}
SKYRL_INLINE void load2(const Float16* p, Vec* a, Vec* b) {
  *a = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  *b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + kLanes)));
}
SKYRL_INLINE void store2(Float16* p, Vec a, Vec b) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + kLanes), _mm256_cvtps_ph(b, kNearest));
}

#else  // baseline: the compiler's own vectors of four, SSE2 or NEON

constexpr int kLanes = 4;
constexpr int kGroupPairs = 2;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
typedef uint32_t UnsignedVec __attribute__((vector_size(16)));

SKYRL_INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
SKYRL_INLINE Vec add(Vec a, Vec b) { return a + b; }
SKYRL_INLINE Vec sub(Vec a, Vec b) { return a - b; }
SKYRL_INLINE Vec mul(Vec a, Vec b) { return a * b; }
SKYRL_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
SKYRL_INLINE Vec select(IntVec where, Vec a, Vec b) {
  return (Vec)((where & (IntVec)a) | (~where & (IntVec)b));
}
SKYRL_INLINE Vec max(Vec a, Vec b) { return select((IntVec)(a > b), a, b); }  // b if either is NaN
SKYRL_INLINE bool any_greater(Vec a, Vec b) {
  const IntVec greater = (IntVec)(a > b);
  return (greater[0] | greater[1] | greater[2] | greater[3]) != 0;
}
using BitVec = IntVec;
SKYRL_INLINE BitVec bits(Vec v) { return (BitVec)v; }
SKYRL_INLINE BitVec max_bits(BitVec a, BitVec b) {
  const BitVec where = a > b;
  return (where & a) | (~where & b);
}
SKYRL_INLINE bool any_outside(BitVec v) {
  const BitVec outside = v > BitVec{} + kMinExponentBits;
  return (outside[0] | outside[1] | outside[2] | outside[3]) != 0;
}
SKYRL_INLINE Vec zero_where_less(Vec value, Vec a, Vec b) {
  return (Vec)(~(IntVec)(a < b) & (IntVec)value);
}
SKYRL_INLINE double sum_lanes(Vec v) {
  return (static_cast<double>(v[0]) + v[1]) + (static_cast<double>(v[2]) + v[3]);
}
SKYRL_INLINE void store_lanes(float* p, Vec v) { memcpy(p, &v, sizeof v); }
// p * 2^n, where the low bits of `shifted` = n + kShift hold n. Unsigned: what the caller throws
// away (n out of range) may wrap around.
SKYRL_INLINE Vec scale_by_low_bits(Vec p, Vec shifted) {
  return (Vec)((UnsignedVec)p + ((UnsignedVec)shifted << 23));
}

template <typename T>
SKYRL_INLINE void load2(const T* p, Vec* a, Vec* b) {
  *a = Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
  *b = Vec{to_float(p[4]), to_float(p[5]), to_float(p[6]), to_float(p[7])};
}
template <typename T>
SKYRL_INLINE void store2(T* p, Vec a, Vec b) {
  for (int i = 0; i < kLanes; ++i) {
    from_float(a[i], p + i);
    from_float(b[i], p + kLanes + i);
  }
}

#endif

#if !defined(SKYRL_SIMD_AVX512)
constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// 2^f for |f| <= 1/2 by degree: minimax among those with 2^0 = 1. Relative errors 1e-4,
// 3e-6, 1.7e-7.
constexpr float kExp2[6][6] = {
    {},
    {},
    {},
    {1.0f, 0.693282962f, 0.24221091f, 0.055008743f},
    {1.0f, 0.693124175f, 0.240240991f, 0.0559064262f, 0.00958283432f},
    {1.0f, 0.693147004f, 0.240222424f, 0.0555073395f, 0.00967151299f, 0.00132647029f},
};

template <int kDegree>
SKYRL_INLINE Vec exp2_normal(Vec y) {
  const Vec shifted = add(y, set1(kShift));
  const Vec f = sub(y, sub(shifted, set1(kShift)));  // y less its nearest integer
  Vec p = fma(set1(kExp2[kDegree][kDegree]), f, set1(kExp2[kDegree][kDegree - 1]));
  for (int k = kDegree - 2; k >= 0; --k) p = fma(p, f, set1(kExp2[kDegree][k]));
  return scale_by_low_bits(p, shifted);
}
// Two at once, step by step: their chains of dependent instructions overlap.
template <int kDegree>
SKYRL_INLINE void exp2_normal2(Vec y0, Vec y1, Vec* e0, Vec* e1) {
  const Vec s0 = add(y0, set1(kShift)), s1 = add(y1, set1(kShift));
  const Vec f0 = sub(y0, sub(s0, set1(kShift))), f1 = sub(y1, sub(s1, set1(kShift)));
  Vec p0 = fma(set1(kExp2[kDegree][kDegree]), f0, set1(kExp2[kDegree][kDegree - 1]));
  Vec p1 = fma(set1(kExp2[kDegree][kDegree]), f1, set1(kExp2[kDegree][kDegree - 1]));
  for (int k = kDegree - 2; k >= 0; --k) {
    p0 = fma(p0, f0, set1(kExp2[kDegree][k]));
    p1 = fma(p1, f1, set1(kExp2[kDegree][k]));
  }
  *e0 = scale_by_low_bits(p0, s0);
  *e1 = scale_by_low_bits(p1, s1);
}
template <int kDegree>
SKYRL_INLINE Vec exp2_or_zero(Vec y) {
  return zero_where_less(exp2_normal<kDegree>(max(set1(kMinExponent), y)), y, set1(kMinExponent));
}
#endif

#if defined(SKYRL_SIMD_AVX512) || defined(SKYRL_SIMD_AVX2)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;
#endif

}  // namespace
}  // namespace skyrl_fast
