// Off-policy correction on the CPU: blocks of sequences on several threads, summed in a fixed
// order.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/parallel.h"
#include "core/simd.h"
#include "policy_loss/off_policy.h"
#include "policy_loss/off_policy_blocks.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kBlockSequences = 16;       // of one partial sum; fixes the order of summation
constexpr int64_t kCellsPerThread = 1 << 17;  // below this a thread costs more than it saves

template <typename T>
OffPolicyBlock<T> block_kernel() {
  if constexpr (std::is_same_v<T, float>) {
    return SKYRL_OF_SIMD_LEVEL(off_policy_block);
  } else {
    return off_policy_block_float64();
  }
}

void add(const OffPolicySums& s, OffPolicySums* total) {
  if (s.tokens > 0) {  // deviations from the block's mean to those from the common mean
    const double before = total->tokens;
    const double gap = before > 0 ? s.excess / s.tokens - total->excess / before : 0.0;
    total->squares += s.squares + gap * gap * before * s.tokens / (before + s.tokens);
  }
  total->tokens += s.tokens;
  total->excess += s.excess;
  total->ratio_max = std::max(total->ratio_max, s.ratio_max);
  total->ratio_min = std::min(total->ratio_min, s.ratio_min);
  total->left += s.left;
  total->dropped += s.dropped;
  total->kept += s.kept;
  total->capped += s.capped;
  total->sequences += s.sequences;
  total->outliers += s.outliers;
  total->outliers_high += s.outliers_high;
  total->outliers_low += s.outliers_low;
  total->sequences_capped += s.sequences_capped;
  total->masked += s.masked;
  total->masked_high += s.masked_high;
  total->masked_low += s.masked_low;
}

double share(double part, double total) { return part / std::max(total, 1.0); }

void write_metrics(const OffPolicySums& s, double* metrics) {
  const bool any = s.tokens > 0;
  metrics[kIsRatioMean] = any ? 1.0 + s.excess / s.tokens : 0.0;
  metrics[kIsRatioStd] = std::sqrt(share(s.squares, s.tokens - 1));
  metrics[kIsRatioMax] = any ? s.ratio_max : 0.0;
  metrics[kIsRatioMin] = any ? s.ratio_min : 0.0;
  metrics[kOutlierMasked] = share(s.outliers, s.sequences);
  metrics[kOutlierOverHigh] = share(s.outliers_high, s.sequences);
  metrics[kOutlierUnderLow] = share(s.outliers_low, s.sequences);
  metrics[kTokenMasked] = share(s.dropped, s.left);
  metrics[kTisTokenCapped] = share(s.capped, s.kept);
  metrics[kTisSequenceCapped] = share(s.sequences_capped, s.sequences);
  metrics[kSequenceMasked] = share(s.masked, s.sequences);
  metrics[kSequenceOverHigh] = share(s.masked_high, s.sequences);
  metrics[kSequenceUnderLow] = share(s.masked_low, s.sequences);
}

}  // namespace

template <typename T>
void off_policy_correction_cpu(const OffPolicyRules& rules, const OffPolicyInputs<T>& in,
                               void* new_mask, T* weights, double* metrics, int num_threads) {
  const OffPolicyJob<T> job{rules, in, new_mask, weights};
  const int64_t num_blocks = (in.num_sequences + kBlockSequences - 1) / kBlockSequences;
  std::vector<OffPolicySums> partial(num_blocks);
  const auto block = block_kernel<T>();
  const int64_t num_cells = in.rows.num_rows > 0 ? in.rows.offset(in.rows.num_rows) : 0;
  const int64_t cells_per_block =
      std::max<int64_t>(1, num_cells / std::max<int64_t>(1, num_blocks));
  parallel_for(num_threads, num_blocks, kCellsPerThread / cells_per_block + 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t b = begin; b < end; ++b) {
                   block(job, b * kBlockSequences,
                         std::min(in.num_sequences, (b + 1) * kBlockSequences), &partial[b]);
                 }
               });
  OffPolicySums total;
  total.ratio_min = std::numeric_limits<double>::infinity();
  for (const OffPolicySums& s : partial) add(s, &total);
  write_metrics(total, metrics);
}

#define SKYRL_INSTANTIATE(T)                                                                   \
  template void off_policy_correction_cpu<T>(const OffPolicyRules&, const OffPolicyInputs<T>&, \
                                             void*, T*, double*, int);
SKYRL_INSTANTIATE(float)
SKYRL_INSTANTIATE(double)
#undef SKYRL_INSTANTIATE

}  // namespace skyrl_fast
