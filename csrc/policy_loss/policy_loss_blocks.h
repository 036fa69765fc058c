// The loops of policy_loss_cpu.cpp over blocks of cells, one set per SIMD level. Internal to it.
#pragma once

#include "policy_loss/loss_sums.h"

namespace skyrl_fast {

template <typename T>
struct LossJob {
  LossKind loss;
  KlKind kl;
  LossParams<T> params;
  PolicyLossInputs<T> in;
  T* grad;  // null: not computed
};

template <typename T>
struct KlJob {
  KlKind kl;
  const T* logprobs;
  const T* reference;
  LossMask mask;
  const T* grad_out;  // null: compute the value, not the gradient
  T* out;
};

// Two arrays of log-probabilities to compare, and the cells.
template <typename T>
struct DeltaJob {
  const T* a;
  const T* b;
  LossMask mask;
  RowLayout rows;
};

// Ranges are cells, and rows for the functions that write per row. Sums are in element order.
template <typename T>
struct BlockKernels {
  void (*loss)(const LossJob<T>&, int64_t begin, int64_t end, LossSums* sums);
  void (*kl)(const KlJob<T>&, int64_t begin, int64_t end);
  void (*delta)(const DeltaJob<T>&, int64_t begin_row, int64_t end_row, double* sums);
};

struct BlockKernelSet {
  BlockKernels<float> float32;
  void (*counts)(const LossMask&, const RowLayout&, int64_t begin_row, int64_t end_row,
                 int64_t* counts);
};

const BlockKernelSet& policy_loss_blocks_baseline();
const BlockKernelSet& policy_loss_blocks_avx2();
const BlockKernelSet& policy_loss_blocks_avx512();
// float64 is for gradient checks: baseline level only.
const BlockKernels<double>& policy_loss_blocks_float64();

}  // namespace skyrl_fast
