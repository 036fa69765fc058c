// Page hints for large host blocks.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace skyrl_fast {

// Asks the kernel for huge pages in [data, data + num_bytes). Fresh 4 KB pages cost more to map
// than most kernels here cost to run. A hint: if refused, nothing changes.
inline void advise_huge_pages(void* data, int64_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + num_bytes) & ~(kPage - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)num_bytes;
#endif
}

}  // namespace skyrl_fast
