// Two floats, each rounded as if alone: one instruction on devices of compute capability 10 or
// higher, two on others.
#pragma once

#include <cmath>

#include "core/tensor.h"

namespace skyrl_fast {

struct FloatPair {
  float first, second;
};

SKYRL_HD FloatPair twice(float x) { return {x, x}; }

// a * b + c
SKYRL_HD FloatPair multiply_add(const FloatPair& a, const FloatPair& b, const FloatPair& c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  FloatPair out;
  asm("{\n"
      ".reg .b64 a, b, c, d;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "mov.b64 c, {%6, %7};\n"
      "fma.rn.f32x2 d, a, b, c;\n"
      "mov.b64 {%0, %1}, d;\n"
      "}"
      : "=f"(out.first), "=f"(out.second)
      : "f"(a.first), "f"(a.second), "f"(b.first), "f"(b.second), "f"(c.first), "f"(c.second));
  return out;
#else
  return {fmaf(a.first, b.first, c.first), fmaf(a.second, b.second, c.second)};
#endif
}

SKYRL_HD FloatPair add(const FloatPair& a, const FloatPair& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  FloatPair out;
  asm("{\n"
      ".reg .b64 a, b, d;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "add.rn.f32x2 d, a, b;\n"
      "mov.b64 {%0, %1}, d;\n"
      "}"
      : "=f"(out.first), "=f"(out.second)
      : "f"(a.first), "f"(a.second), "f"(b.first), "f"(b.second));
  return out;
#else
  return {a.first + b.first, a.second + b.second};
#endif
}

SKYRL_HD FloatPair multiply(const FloatPair& a, const FloatPair& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  FloatPair out;
  asm("{\n"
      ".reg .b64 a, b, d;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "mul.rn.f32x2 d, a, b;\n"
      "mov.b64 {%0, %1}, d;\n"
      "}"
      : "=f"(out.first), "=f"(out.second)
      : "f"(a.first), "f"(a.second), "f"(b.first), "f"(b.second));
  return out;
#else
  return {a.first * b.first, a.second * b.second};
#endif
}

}  // namespace skyrl_fast
