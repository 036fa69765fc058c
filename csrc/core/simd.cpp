// Detection of the SIMD level, and the active level.
#include "core/simd.h"

#include <atomic>
#include <stdexcept>

namespace skyrl_fast {
namespace {

SimdLevel highest_level() {
#if defined(SKYRL_SIMD_X86)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    return SimdLevel::kBaseline;
  }
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? SimdLevel::kAvx512 : SimdLevel::kAvx2;
#else
  return SimdLevel::kBaseline;
#endif
}

std::atomic<SimdLevel>& level_in_force() {
  static std::atomic<SimdLevel> level{highest_level()};
  return level;
}

}  // namespace

SimdLevel simd_level() { return level_in_force().load(std::memory_order_relaxed); }

const char* simd_level_name(SimdLevel level) {
  switch (level) {
    case SimdLevel::kBaseline: return "baseline";
    case SimdLevel::kAvx2: return "avx2";
    case SimdLevel::kAvx512: return "avx512";
  }
  return "baseline";
}

void set_simd_level(const std::string& name) {
  for (const SimdLevel level : {SimdLevel::kBaseline, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    if (name != simd_level_name(level)) continue;
    if (level > highest_level()) {
      throw std::invalid_argument("set_simd_level: level: expected one this CPU has, at most " +
                                  std::string(simd_level_name(highest_level())) + ", got " + name);
    }
    level_in_force().store(level, std::memory_order_relaxed);
    return;
  }
  throw std::invalid_argument("set_simd_level: level: expected baseline, avx2 or avx512, got " +
                              name);
}

}  // namespace skyrl_fast
