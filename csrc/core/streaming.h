// Stores past the caches: a line that is not read soon need not be fetched before it is written.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace skyrl_fast {
namespace {  // included by sources of different SIMD levels, which must not share code

constexpr int64_t kLineBytes = 64;
constexpr int64_t kStreamedBytes = 16 << 20;  // larger outputs leave a core's caches anyway

// Bytes from p to the next line, at most num_bytes.
inline int64_t bytes_to_line(const void* p, int64_t num_bytes) {
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) % kLineBytes);
  const int64_t missing = past == 0 ? 0 : kLineBytes - past;
  return missing < num_bytes ? missing : num_bytes;
}

// Writes one line; `from` may have any alignment. Other threads see it only after `end_streaming`.
inline void stream_line(const void* from, void* line) {
#if defined(SKYRL_SIMD_AVX512)
  _mm512_stream_si512(static_cast<__m512i*>(line), _mm512_loadu_si512(from));
#elif defined(SKYRL_SIMD_AVX2)
  const __m256i* in = static_cast<const __m256i*>(from);
  const __m256i low = _mm256_loadu_si256(in), high = _mm256_loadu_si256(in + 1);
  _mm256_stream_si256(static_cast<__m256i*>(line), low);
  _mm256_stream_si256(static_cast<__m256i*>(line) + 1, high);
#elif defined(__SSE2__)
  __m128i part[4];
  for (int k = 0; k < 4; ++k) part[k] = _mm_loadu_si128(static_cast<const __m128i*>(from) + k);
  for (int k = 0; k < 4; ++k) _mm_stream_si128(static_cast<__m128i*>(line) + k, part[k]);
#else
  std::memcpy(line, from, kLineBytes);
#endif
}

// Waits for the stores of this thread; call once for many lines.
inline void end_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace skyrl_fast
