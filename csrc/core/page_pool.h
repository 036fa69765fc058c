// Large host blocks that are reused: mapping fresh pages costs more than most kernels here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace skyrl_fast {

struct Pages {
  void* data = nullptr;
  int64_t num_bytes = 0;  // bytes mapped, at least the bytes requested
};

// Blocks of huge pages (where the kernel grants them). A returned block keeps its pages and is
// cached for the next caller, up to a limit on idle bytes. Thread-safe.
class PagePool {
 public:
  // Throws bad_alloc if the memory is not available.
  Pages take(int64_t num_bytes);
  void give(Pages pages);

  void set_idle_limit(int64_t num_bytes);  // 0 keeps nothing
  int64_t idle_limit() const;              // negative until it was set
  int64_t idle_bytes() const;

 private:
  void drop_until(int64_t num_bytes);

  mutable std::mutex mutex_;
  std::vector<Pages> idle_;  // oldest first
  int64_t idle_bytes_ = 0;
  int64_t idle_limit_ = -1;
};

PagePool& page_pool();

}  // namespace skyrl_fast
