// Blocks of sequences: ratios, masks, weights and their statistics. Compiled once per SIMD level.
//
// Plain scalar loops, which the compiler vectorises. All linkage is internal, see cell_chunks.h.
#include "policy_loss/off_policy_blocks.h"

#include "policy_loss/cell_chunks.h"

namespace skyrl_fast {
namespace {

template <typename T>
struct alignas(64) Ratios {
  typename BitsOf<T>::Type live[kChunk];
  T delta[kChunk];
  T ratio[kChunk];
  T excess[kChunk];  // ratio - 1
  T scratch[kChunk];
  Extremes<T> extremes;
};

// Statistics of a sequence that the rules read.
struct SequenceStats {
  double tokens = 0;  // trained before any rule
  double ratio_max = 0, ratio_min = 0;
  double kept = 0, log_product = 0;  // after outliers and token mask
};

// delta, ratio and excess of trained cells; those of delta 0 elsewhere.
template <typename T>
static void stage(const T* __restrict__ old, const T* __restrict__ rollout, int64_t n,
                  const typename BitsOf<T>::Type* __restrict__ lives, Ratios<T>* __restrict__ s) {
  Extremes<T> extremes;
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    const bool live = lives[i] != 0;
    const T raw_old = old[i], raw_rollout = rollout[i];
    const T delta = (live ? raw_old : T(0)) - (live ? raw_rollout : T(0));
    const Exponential<T> ratio = exponential(clamp_to(delta, T(-kMaxDelta), T(kMaxDelta)));
    s->delta[i] = delta;
    s->ratio[i] = ratio.value;
    s->excess[i] = ratio.minus_1;
    const bool counts = live & (delta == delta);
    const auto bits = bits_of(ratio.value);
    const auto high = counts ? bits : 0, low = counts ? bits : BitsOf<T>::kMost;
    extremes.most = high > extremes.most ? high : extremes.most;
    extremes.least = low < extremes.least ? low : extremes.least;
  }
  s->extremes = extremes;
}

// Squared deviations are merged chunk by chunk from centred sums (Chan et al.), so that ratios near
// 1 keep their variance.
template <typename T>
static void add_statistics(int64_t count, int64_t n,
                           const typename BitsOf<T>::Type* __restrict__ lives,
                           Ratios<T>* __restrict__ s, SequenceStats* stats, OffPolicySums* sums) {
  const double most = float_of<T>(s->extremes.most), least = float_of<T>(s->extremes.least);
  if (most > stats->ratio_max) stats->ratio_max = most;
  if (s->extremes.least != BitsOf<T>::kMost && least < stats->ratio_min) stats->ratio_min = least;
  const double added = static_cast<double>(count), before = sums->tokens;
  const double sum = fold(s->excess, n), mean = sum / added;
  const T centre = static_cast<T>(mean);
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    const T deviation = s->excess[i] - centre;
    s->scratch[i] = lives[i] != 0 ? deviation * deviation : T(0);
  }
  const double gap = before > 0 ? mean - sums->excess / before : 0.0;
  sums->squares += fold(s->scratch, n) + gap * gap * before * added / (before + added);
  sums->excess += sum;
  sums->tokens += added;
  stats->tokens += added;
}

// Token mask and token TIS of one chunk: writes the mask and the weights.
template <typename Mask, typename T>
static void correct(const OffPolicyRules& rules, int64_t n, Ratios<T>* __restrict__ s,
                    Mask* __restrict__ new_mask, T* __restrict__ weights, SequenceStats* stats,
                    OffPolicySums* sums) {
  const bool bounded = rules.bounded, by_token = rules.tis == TisKind::kToken;
  const T low = static_cast<T>(rules.token_low), high = static_cast<T>(rules.token_high);
  const T cap = static_cast<T>(rules.cap);
  int32_t left = 0, kept = 0, capped = 0;
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    const bool live = s->live[i] != 0;
    const T ratio = s->ratio[i];
    const bool inside = (ratio >= low) & (ratio <= high);
    const bool keep = live & (inside | !bounded);
    const bool over = ratio > cap;
    const T weight = over ? cap : ratio;
    s->delta[i] = keep ? s->delta[i] : T(0);
    s->scratch[i] = keep ? weight : T(0);
    s->live[i] = keep;
    left += live;
    kept += keep;
    capped += keep & over;
  }
  if (new_mask != nullptr) {
    SKYRL_NO_OVERLAP
    for (int64_t i = 0; i < n; ++i) new_mask[i] = static_cast<Mask>(s->live[i]);
  }
  if (weights != nullptr) {
    if (by_token) {
      memcpy(weights, s->scratch, n * sizeof(T));
    } else {  // 1 where kept: replaced by the sequence's weight once that is known
      SKYRL_NO_OVERLAP
      for (int64_t i = 0; i < n; ++i) weights[i] = static_cast<T>(s->live[i]);
    }
  }
  sums->left += left;
  sums->kept += kept;
  sums->dropped += left - kept;
  sums->capped += capped;
  stats->kept += kept;
  if (rules.tis == TisKind::kSequence || rules.sequence_mask != SequenceMaskKind::kNone) {
    stats->log_product += fold(s->delta, n);
  }
}

SKYRL_HD double ratio_of(double delta) {
  return exponential(clamp_to(delta, -kMaxDelta, kMaxDelta)).value;
}

// A row's cells in chunks: fn(first cell, cells).
template <typename Fn>
SKYRL_HD void chunks_of_row(const RowLayout& rows, int64_t row, const Fn& fn) {
  const int64_t end = offset_of(rows, row + 1);
  for (int64_t cell = offset_of(rows, row); cell < end; cell += kChunk) {
    fn(cell, end - cell < kChunk ? end - cell : kChunk);
  }
}

template <typename Mask, typename T>
struct Output {
  Mask* new_mask;
  T* weights;

  void clear(int64_t cell, int64_t n) const {
    if (new_mask != nullptr) fill(new_mask + cell, n, Mask(0));
    if (weights != nullptr) fill(weights + cell, n, T(0));
  }
};

// Visits the rows of a sequence: statistics, correction, or both at once.
template <bool kStatistics, bool kCorrect, typename Mask, typename T>
static void visit(const OffPolicyJob<T>& job, const Output<Mask, T>& out, int64_t first,
                  int64_t last, Ratios<T>* s, SequenceStats* stats, OffPolicySums* sums) {
  const OffPolicyInputs<T>& in = job.in;
  for (int64_t k = first; k < last; ++k) {
    const int64_t row = in.order != nullptr ? in.order[k] : k;
    chunks_of_row(in.rows, row, [&](int64_t chunk, int64_t length) {
      const int64_t count = read_mask(in.mask, chunk, length, s->live);
      int64_t begin = 0, end = count > 0 ? length : 0;
      trim(s->live, &begin, &end);
      if (kCorrect) {
        out.clear(chunk, begin);
        out.clear(chunk + end, length - end);
      }
      if (count == 0) return;
      const int64_t cell = chunk + begin, n = end - begin;
      if (begin > 0) memmove(s->live, s->live + begin, n * sizeof(s->live[0]));
      stage(in.old + cell, in.rollout + cell, n, s->live, s);
      if (kStatistics) add_statistics(count, n, s->live, s, stats, sums);
      if (kCorrect) {
        correct(job.rules, n, s, out.new_mask != nullptr ? out.new_mask + cell : nullptr,
                out.weights != nullptr ? out.weights + cell : nullptr, stats, sums);
      }
    });
  }
}

// Calls fn(first cell, cells) for each row of a sequence.
template <typename T, typename Fn>
SKYRL_HD void rows_of(const OffPolicyInputs<T>& in, int64_t first, int64_t last, const Fn& fn) {
  for (int64_t k = first; k < last; ++k) {
    const int64_t row = in.order != nullptr ? in.order[k] : k;
    const int64_t begin = offset_of(in.rows, row);
    fn(begin, offset_of(in.rows, row + 1) - begin);
  }
}

// TIS by sequence and the sequence mask, once the product of the kept ratios is known.
template <typename Mask, typename T>
static void finish_sequence(const OffPolicyJob<T>& job, const Output<Mask, T>& out, int64_t first,
                            int64_t last, const SequenceStats& stats, OffPolicySums* sums) {
  const OffPolicyRules& rules = job.rules;
  const bool counted = stats.tokens > 0;
  bool drop = false;
  if (rules.sequence_mask != SequenceMaskKind::kNone) {
    const bool mean = rules.sequence_mask == SequenceMaskKind::kGeometric;
    const double tokens = mean && stats.kept > 1 ? stats.kept : 1.0;
    const double ratio = ratio_of(stats.log_product / tokens);
    const bool over = ratio > rules.mask_high, under = ratio < rules.mask_low;
    drop = over | under;
    sums->masked += counted & drop;
    sums->masked_high += counted & over;
    sums->masked_low += counted & under;
  }
  double weight = 1.0;
  if (rules.tis == TisKind::kSequence) {
    weight = ratio_of(stats.log_product);
    const bool over = weight > rules.cap;
    sums->sequences_capped += counted & over;
    if (over) weight = rules.cap;
  }
  if (stats.kept == 0) return;
  if (drop) {
    rows_of(job.in, first, last, [&](int64_t cell, int64_t n) { out.clear(cell, n); });
  } else if (rules.tis == TisKind::kSequence) {
    const T factor = static_cast<T>(weight);
    rows_of(job.in, first, last, [&](int64_t cell, int64_t n) {
      T* __restrict__ w = out.weights + cell;
      SKYRL_NO_OVERLAP
      for (int64_t i = 0; i < n; ++i) w[i] = w[i] != T(0) ? factor : T(0);
    });
  }
}

template <typename Mask, typename T>
static void sequences_block(const OffPolicyJob<T>& job, int64_t begin, int64_t end,
                            OffPolicySums* out_sums) {
  const OffPolicyRules& rules = job.rules;
  const Output<Mask, T> out = {static_cast<Mask*>(job.new_mask), job.weights};
  Ratios<T> staged;
  OffPolicySums sums;
  sums.ratio_min = INFINITY;
  for (int64_t sequence = begin; sequence < end; ++sequence) {
    const int64_t* starts = job.in.starts;
    const int64_t first = starts != nullptr ? starts[sequence] : sequence;
    const int64_t last = starts != nullptr ? starts[sequence + 1] : sequence + 1;
    SequenceStats stats;
    stats.ratio_min = INFINITY;
    bool outlier = false;
    if (rules.outliers) {
      visit<true, false>(job, out, first, last, &staged, &stats, &sums);
      const bool some = stats.tokens > 0;
      const bool over = some & (stats.ratio_max > rules.outlier_high);
      const bool under = some & (stats.ratio_min < rules.outlier_low);
      outlier = over | under;
      sums.outliers += outlier;
      sums.outliers_high += over;
      sums.outliers_low += under;
      if (outlier) {
        rows_of(job.in, first, last, [&](int64_t cell, int64_t n) { out.clear(cell, n); });
      } else {
        visit<false, true>(job, out, first, last, &staged, &stats, &sums);
      }
    } else {
      visit<true, true>(job, out, first, last, &staged, &stats, &sums);
    }
    sums.sequences += stats.tokens > 0;
    if (stats.ratio_max > sums.ratio_max) sums.ratio_max = stats.ratio_max;
    if (stats.ratio_min < sums.ratio_min) sums.ratio_min = stats.ratio_min;
    finish_sequence(job, out, first, last, stats, &sums);
  }
  *out_sums = sums;
}

template <typename T>
static void block(const OffPolicyJob<T>& job, int64_t begin, int64_t end, OffPolicySums* sums) {
  switch (job.in.mask.type) {
    case MaskType::kUInt8: return sequences_block<uint8_t>(job, begin, end, sums);
    case MaskType::kInt64: return sequences_block<int64_t>(job, begin, end, sums);
    case MaskType::kFloat32: return sequences_block<float>(job, begin, end, sums);
  }
}

}  // namespace

#if defined(SKYRL_SIMD_AVX512)
OffPolicyBlock<float> off_policy_block_avx512() { return block<float>; }
#elif defined(SKYRL_SIMD_AVX2)
OffPolicyBlock<float> off_policy_block_avx2() { return block<float>; }
#else
OffPolicyBlock<float> off_policy_block_baseline() { return block<float>; }
OffPolicyBlock<double> off_policy_block_float64() { return block<double>; }
#endif

}  // namespace skyrl_fast
