// The loop of off_policy_cpu.cpp over blocks of sequences, one per SIMD level. Internal to it.
#pragma once

#include "policy_loss/off_policy.h"

namespace skyrl_fast {

template <typename T>
struct OffPolicyJob {
  OffPolicyRules rules;
  OffPolicyInputs<T> in;
  void* new_mask;
  T* weights;
};

// Sums of one block of sequences, in order.
struct OffPolicySums {
  double tokens = 0, excess = 0, squares = 0;          // trained; of ratio - 1; of its deviations
  double ratio_max = 0, ratio_min = 0;                 // without NaN; min is +inf if there is none
  double left = 0, dropped = 0, kept = 0, capped = 0;  // tokens: before and after the token mask
  double sequences = 0;                                // with a trained token
  double outliers = 0, outliers_high = 0, outliers_low = 0;
  double sequences_capped = 0;
  double masked = 0, masked_high = 0, masked_low = 0;
};

template <typename T>
using OffPolicyBlock = void (*)(const OffPolicyJob<T>&, int64_t begin, int64_t end,
                                OffPolicySums* sums);

OffPolicyBlock<float> off_policy_block_baseline();
OffPolicyBlock<float> off_policy_block_avx2();
OffPolicyBlock<float> off_policy_block_avx512();
// float64 is for tests: baseline level only.
OffPolicyBlock<double> off_policy_block_float64();

}  // namespace skyrl_fast
