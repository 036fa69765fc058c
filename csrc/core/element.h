// Elements of logits as floats: bfloat16, float16, float32, for host and device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/tensor.h"
#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace skyrl_fast {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

SKYRL_HD float float_of_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

SKYRL_HD uint32_t bits_of_float(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

SKYRL_HD float to_float(float x) { return x; }
SKYRL_HD float to_float(Bf16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }
SKYRL_HD float to_float(Fp16 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  constexpr float kSmallest = 5.9604644775390625e-8f;  // 2^-24, the unit of subnormals
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 1023u;
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * kSmallest;
    return sign != 0 ? -value : value;
  }
  const uint32_t shifted = exponent == 31 ? 255u : exponent + 112u;  // bias 127 - 15
  return float_of_bits(sign | shifted << 23 | mantissa << 13);
#endif
}

// Elements that a 32-bit word holds: the first, and their maxima place by place, NaN apart.
SKYRL_HD float low_float(uint32_t word, float) { return float_of_bits(word); }
SKYRL_HD float low_float(uint32_t word, Bf16) { return float_of_bits(word << 16); }
SKYRL_HD float low_float(uint32_t word, Fp16) {
  return to_float(Fp16{static_cast<uint16_t>(word & 0xffffu)});
}
SKYRL_HD uint32_t minus_infinity(float) { return 0xff800000u; }  // one element's bits
SKYRL_HD uint32_t minus_infinity(Bf16) { return 0xff80u; }
SKYRL_HD uint32_t minus_infinity(Fp16) { return 0xfc00u; }
SKYRL_HD float high_float(uint32_t word, float) { return float_of_bits(word); }
SKYRL_HD float high_float(uint32_t word, Bf16) { return float_of_bits(word & 0xffff0000u); }
SKYRL_HD float high_float(uint32_t word, Fp16) {
  return to_float(Fp16{static_cast<uint16_t>(word >> 16)});
}
SKYRL_HD uint32_t larger_words(uint32_t a, uint32_t b, float) {
  return bits_of_float(fmaxf(float_of_bits(a), float_of_bits(b)));
}
SKYRL_HD uint32_t larger_words(uint32_t a, uint32_t b, Bf16 type) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
#else
  const float low = fmaxf(low_float(a, type), low_float(b, type));
  const float high = fmaxf(high_float(a, type), high_float(b, type));
  return bits_of_float(low) >> 16 | (bits_of_float(high) & 0xffff0000u);
#endif
}
SKYRL_HD uint32_t larger_words(uint32_t a, uint32_t b, Fp16 type) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("max.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
#else
  const uint32_t low =
      low_float(a, type) > low_float(b, type) || low_float(b, type) != low_float(b, type) ? a : b;
  const uint32_t high =
      high_float(a, type) > high_float(b, type) || high_float(b, type) != high_float(b, type) ? a
                                                                                              : b;
  return (low & 0xffffu) | (high & 0xffff0000u);
#endif
}

// Round to nearest, ties to even; NaN stays NaN.
template <typename T>
SKYRL_HD T from_float(float x);

template <>
SKYRL_HD float from_float<float>(float x) {
  return x;
}

template <>
SKYRL_HD Bf16 from_float<Bf16>(float x) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const uint32_t bits = bits_of_float(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 64u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
#endif
}

template <>
SKYRL_HD Fp16 from_float<Fp16>(float x) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const uint32_t bits = bits_of_float(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const float size = std::fabs(x);
  if (x != x) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (size < 6.103515625e-5f) {  // 2^-14: a multiple of 2^-24
    return {
        static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(size * 16777216.0f)))};
  }
  const uint32_t rounded = (bits & 0x7fffffffu) + 0xfffu + (bits >> 13 & 1u);
  return {static_cast<uint16_t>(sign | static_cast<uint16_t>((rounded >> 13) - (112u << 10)))};
#endif
}

// The word of two elements, the first in its low half.
template <typename T>
SKYRL_HD uint32_t word_of(float low, float high, T) {
  return static_cast<uint32_t>(from_float<T>(low).bits) |
         static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
#if defined(__CUDA_ARCH__)
// One instruction; for two conversions the compiler may take slower ones.
__device__ __forceinline__ uint32_t word_of(float low, float high, Bf16) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ uint32_t word_of(float low, float high, Fp16) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
#endif

}  // namespace skyrl_fast
