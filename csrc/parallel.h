// Threads for large loops: started per call, so that forked children and idle processes own none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace skyrl_fast {

// Runs fn(begin, end) over [0, n) split in equal contiguous parts, at most num_threads of them and
// none smaller than `grain`. The caller's thread takes the first part. Which elements share a part
// depends on num_threads; results must not (write disjoint outputs, or combine in element order).
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
  auto run = [&](int64_t part) {
    try {
      fn(n * part / parts, n * (part + 1) / parts);
    } catch (...) {
      errors[part] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(parts - 1);
  for (int64_t part = 1; part < parts; ++part) {
    try {
      threads.emplace_back(run, part);
    } catch (...) {  // no thread to be had: do the part here
      run(part);
    }
  }
  run(0);
  for (auto& thread : threads) thread.join();
  for (auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace skyrl_fast
