// Large host blocks that are reused.
#include "core/page_pool.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "core/memory.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kHugePage = 2 << 20;

// Sizes in steps of an eighth: batches of nearly equal size share blocks, and the excess is never
// touched, so never mapped.
int64_t rounded_size(int64_t num_bytes) {
  // No address space holds more, and the arithmetic below does not overflow up to here.
  constexpr int64_t kMostBytes = int64_t{1} << 60;
  if (num_bytes > kMostBytes) throw std::bad_alloc();
  int64_t step = kHugePage;
  while (step * 8 < num_bytes) step *= 2;
  return (num_bytes + step - 1) / step * step;
}

Pages map_pages(int64_t num_bytes) {
  void* data = nullptr;
#if defined(__linux__)
  // One huge page more than needed, so that the block can begin at a huge-page boundary.
  void* mapped = mmap(nullptr, num_bytes + kHugePage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  const uintptr_t begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > begin) munmap(mapped, aligned - begin);
  const uintptr_t end = aligned + num_bytes;
  if (begin + num_bytes + kHugePage > end) {
    munmap(reinterpret_cast<void*>(end), begin + num_bytes + kHugePage - end);
  }
  data = reinterpret_cast<void*>(aligned);
#else
  constexpr int64_t kAlignment = 64;
  data = std::aligned_alloc(kAlignment, num_bytes);
  if (data == nullptr) throw std::bad_alloc();
#endif
  advise_huge_pages(data, num_bytes);
  return {data, num_bytes};
}

void unmap_pages(Pages pages) {
#if defined(__linux__)
  munmap(pages.data, pages.num_bytes);
#else
  std::free(pages.data);
#endif
}

}  // namespace

Pages PagePool::take(int64_t num_bytes) {
  const int64_t wanted = rounded_size(num_bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto best = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      const bool fits = it->num_bytes >= wanted && it->num_bytes <= 2 * wanted;
      if (fits && (best == idle_.end() || it->num_bytes < best->num_bytes)) best = it;
    }
    if (best != idle_.end()) {
      const Pages pages = *best;
      idle_.erase(best);
      idle_bytes_ -= pages.num_bytes;
      return pages;
    }
  }
  return map_pages(wanted);
}

void PagePool::give(Pages pages) {
  if (pages.data == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (pages.num_bytes > idle_limit_) return unmap_pages(pages);  // also where no limit was set
  idle_.push_back(pages);
  idle_bytes_ += pages.num_bytes;
  drop_until(idle_limit_);
}

void PagePool::drop_until(int64_t num_bytes) {
  while (idle_bytes_ > num_bytes) {
    idle_bytes_ -= idle_.front().num_bytes;
    unmap_pages(idle_.front());
    idle_.erase(idle_.begin());
  }
}

void PagePool::set_idle_limit(int64_t num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_limit_ = std::max<int64_t>(0, num_bytes);
  drop_until(idle_limit_);
}

int64_t PagePool::idle_limit() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return idle_limit_;
}

int64_t PagePool::idle_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return idle_bytes_;
}

PagePool& page_pool() {
  // Never destroyed: tensors may return their blocks while the interpreter shuts down.
  static PagePool* pool = new PagePool();
  return *pool;
}

}  // namespace skyrl_fast
