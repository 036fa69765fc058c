// The vector kernels of one row of logits, one set per SIMD level. Internal to logprob_cpu.cpp.
#pragma once

#include <stdint.h>

namespace skyrl_fast {

struct RowStats {
  double logprob;  // of the target; NaN where the row holds NaN, +inf, or only -inf
  double lse;      // log sum exp(logits / temperature)
  double entropy;  // in nats; 0 unless requested
};

struct RowGrads {
  double logprob;  // d loss / d logprob
  double entropy;  // d loss / d entropy
};

// `row` and `grad` are vocab elements of the kernel's dtype, in any alignment; grad may be row. In
// the backward, a target below 0 is not among the row's elements.
struct RowKernels {
  void (*forward)(const void* row, int64_t vocab, int64_t target, double temperature,
                  bool with_entropy, RowStats* stats);
  void (*backward)(const void* row, int64_t vocab, int64_t target, double temperature,
                   const RowStats& stats, const RowGrads& grads, void* grad);
};

struct RowKernelSet {
  RowKernels float32, bfloat16, float16;
};

const RowKernelSet& logprob_rows_baseline();
const RowKernelSet& logprob_rows_avx2();
const RowKernelSet& logprob_rows_avx512();

}  // namespace skyrl_fast
