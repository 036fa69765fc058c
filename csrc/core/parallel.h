// Parallel loops on threads that persist between calls: torch's OpenMP threads, or a pool.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <type_traits>
#include <vector>

namespace skyrl_fast {

using RunPart = void (*)(const void* context, int64_t part);

// Calls run(context, part) once for each part of [0, num_parts) and returns when all are done. The
// first part runs on this thread, which may hold the GIL; then it takes parts as the others do and
// never waits for one that has not begun, so calls may nest and come from several threads at once.
// `run` must not throw.
void run_parts(int64_t num_parts, RunPart run, const void* context);

// Runs fn(begin, end) over [0, n) split in equal contiguous parts, at most num_threads of them and
// none smaller than `grain`. Which elements share a part depends on num_threads; results must not
// (write disjoint outputs, or combine in element order).
template <typename Fn>
void parallel_for(int num_threads, int64_t n, int64_t grain, const Fn& fn) {
  if (n <= 0) return;
  const int64_t most_parts = std::max<int64_t>(1, n / std::max<int64_t>(1, grain));
  const int64_t parts = std::min<int64_t>(std::max(1, num_threads), most_parts);
  if (parts == 1) {
    fn(int64_t{0}, n);
    return;
  }
  std::vector<std::exception_ptr> errors(parts);
  const auto run = [&](int64_t part) {
    try {
      fn(n * part / parts, n * (part + 1) / parts);
    } catch (...) {
      errors[part] = std::current_exception();
    }
  };
  using Run = std::remove_reference_t<decltype(run)>;
  run_parts(
      parts, [](const void* context, int64_t part) { (*static_cast<const Run*>(context))(part); },
      &run);
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace skyrl_fast
