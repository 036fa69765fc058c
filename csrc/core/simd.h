// Which instruction set the vector kernels use. Chosen once at run time; tests may force a lower
// one.
#pragma once

#include <string>

namespace skyrl_fast {

// Kernels are compiled once per level (see skyrl_simd_sources in CMakeLists.txt). Baseline is what
// every CPU of the architecture has: SSE2 on x86-64, NEON on aarch64.
enum class SimdLevel : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

SimdLevel simd_level();

// Calls the function name_avx512, name_avx2 or name_baseline of the active level.
#if defined(SKYRL_SIMD_X86)
#define SKYRL_OF_SIMD_LEVEL(name)                       \
  (simd_level() == SimdLevel::kAvx512 ? name##_avx512() \
   : simd_level() == SimdLevel::kAvx2 ? name##_avx2()   \
                                      : name##_baseline())
#else
#define SKYRL_OF_SIMD_LEVEL(name) name##_baseline()
#endif

// "baseline", "avx2" or "avx512".
const char* simd_level_name(SimdLevel level);

// Throws invalid_argument for an unknown name, or a level that this build or CPU lacks.
void set_simd_level(const std::string& name);

}  // namespace skyrl_fast
