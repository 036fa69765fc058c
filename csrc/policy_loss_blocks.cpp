// Blocks of cells: loss, gradient, KL and statistics. Compiled once per SIMD level.
//
// Plain scalar loops over the per-token functions of policy_loss.h, which the compiler vectorises.
// Everything has internal linkage, so that no code made with extra instruction sets can be picked
// by the linker for a CPU that lacks them; hence also no <algorithm>.
#include "tensor.h"
#undef SKYRL_HD
#define SKYRL_HD static inline __attribute__((always_inline))
#include "policy_loss_blocks.h"

// The arrays of a loop do not overlap.
#if defined(__clang__)
#define SKYRL_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define SKYRL_NO_OVERLAP _Pragma("GCC ivdep")
#endif

namespace skyrl_fast {
namespace {

constexpr int64_t kChunk = 512;  // cells staged in the first-level cache
constexpr int kLanes = 16;

template <typename T>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Type = int32_t;
  static constexpr Type kMost = INT32_MAX;
};
template <>
struct BitsOf<double> {
  using Type = int64_t;
  static constexpr Type kMost = INT64_MAX;
};

// Largest and smallest ratio seen. Floats >= 0 are ordered like their bits, and extremes of
// integers vectorise. NaN is left out.
template <typename T>
struct Extremes {
  using Bits = typename BitsOf<T>::Type;
  Bits most = 0, least = BitsOf<T>::kMost;
};
template <typename T>
SKYRL_HD typename BitsOf<T>::Type bits_of(T x) {
  typename BitsOf<T>::Type bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
template <typename T>
SKYRL_HD T float_of(typename BitsOf<T>::Type bits) {
  T x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

template <typename T>
struct Constants {
  T zeros[kChunk] = {};
  T ones[kChunk];
  constexpr Constants() : ones() {
    for (int64_t i = 0; i < kChunk; ++i) ones[i] = T(1);
  }
};
template <typename T>
constexpr Constants<T> kConstants;

template <typename T>
struct alignas(64) Staged {
  typename BitsOf<T>::Type live[kChunk];
  typename BitsOf<T>::Type selected[kChunk];
  T value[kChunk];  // weighted by token and row
  T grad[kChunk];   // of the KL penalty, for kl_block; scratch where no gradient is wanted
  T ratio_minus_1[kChunk];
  T approx_kl[kChunk];
  T kl[kChunk];
  int32_t num_low, num_high, num_chosen;
  Extremes<T> extremes;
};

template <typename T>
SKYRL_HD void fill(T* out, int64_t n, T value) {
  for (int64_t i = 0; i < n; ++i) out[i] = value;
}

// Lives are as wide as the floats beside them: bytes would make vectors of 64 cells and spill.
template <typename Mask, typename Live>
SKYRL_HD int64_t live_of(const Mask* __restrict__ mask, int64_t n, Live* __restrict__ live) {
  int32_t count = 0;
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    live[i] = mask[i] != Mask(0);
    count += static_cast<int32_t>(live[i]);
  }
  return count;
}

// live[0, n) = 1 where the cells [begin, begin + n) are trained; returns how many are.
template <typename Live>
SKYRL_HD int64_t read_mask(const LossMask& mask, int64_t begin, int64_t n, Live* live) {
  switch (mask.type) {
    case MaskType::kUInt8: return live_of(static_cast<const uint8_t*>(mask.data) + begin, n, live);
    case MaskType::kInt64: return live_of(static_cast<const int64_t*>(mask.data) + begin, n, live);
    case MaskType::kFloat32: break;
  }
  return live_of(static_cast<const float*>(mask.data) + begin, n, live);
}

static int64_t offset_of(const RowLayout& rows, int64_t row) {
  return rows.cu != nullptr ? rows.cu[row] : row * rows.width;
}

// The row that holds `cell`.
static int64_t row_of(const RowLayout& rows, int64_t cell) {
  if (rows.cu == nullptr) return cell / rows.width;
  int64_t low = 0, high = rows.num_rows;  // rows.cu[low] <= cell < rows.cu[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (rows.cu[middle] <= cell ? low : high) = middle;
  }
  return low;
}

// Calls fn(row, first cell, number of cells) for pieces of at most kChunk cells of one row each.
template <typename Fn>
SKYRL_HD void for_chunks(const RowLayout& rows, int64_t begin, int64_t end, const Fn& fn) {
  int64_t row = begin < end ? row_of(rows, begin) : 0;
  for (int64_t cell = begin; cell < end;) {
    const int64_t row_end = offset_of(rows, row + 1);
    if (cell >= row_end) {
      ++row;
      continue;
    }
    const int64_t stop = row_end < end ? row_end : end;
    const int64_t n = stop - cell < kChunk ? stop - cell : kChunk;
    fn(row, cell, n);
    cell += n;
  }
}

// Running sums in float64 over lanes, in element order.
struct Lanes {
  double sum[kLanes] = {};
};

// Adds x, padded with zeros to whole lanes.
template <typename T>
SKYRL_HD void accumulate(T* x, int64_t n, Lanes* out) {
  for (; n % kLanes != 0; ++n) x[n] = T(0);
  Lanes lanes = *out;
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes.sum[j] += static_cast<double>(x[i + j]);
  }
  *out = lanes;
}

static double total(Lanes lanes) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int j = 0; j < step; ++j) lanes.sum[j] += lanes.sum[j + step];
  }
  return lanes.sum[0];
}

template <typename T>
SKYRL_HD double fold(T* x, int64_t n) {
  Lanes lanes;
  accumulate(x, n, &lanes);
  return total(lanes);
}

// One row's piece: pointers to its cells.
template <typename T>
struct Piece {
  const T* logprobs;
  const T* anchor;
  const T* advantages;
  const T* token_weights;
  const typename BitsOf<T>::Type* live;
  const typename BitsOf<T>::Type* selected;
  T sequence_delta;
  T row_weight;
  int64_t n;
};

template <LossKind kKind, typename T>
static void loss_chunk(const LossParams<T>& params, const Piece<T>& piece,
                       Staged<T>* __restrict__ s, T* __restrict__ grad) {
  constexpr bool kUsesSelection = kKind == LossKind::kClipCov || kKind == LossKind::kKlCov;
  const LossParams<T> p = params;
  const T* __restrict__ logprobs = piece.logprobs;
  const T* __restrict__ anchor = piece.anchor;
  const T* __restrict__ advantages = piece.advantages;
  const T* __restrict__ token_weights = piece.token_weights;
  const typename BitsOf<T>::Type* __restrict__ lives = piece.live;
  const typename BitsOf<T>::Type* __restrict__ selections = piece.selected;
  const T sequence_delta = piece.sequence_delta, row_weight = piece.row_weight;
  const int64_t n = piece.n;
  int32_t num_low = 0, num_high = 0, num_chosen = 0;
  Extremes<T> extremes;
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    const bool live = lives[i] != 0;
    const T raw_logprob = logprobs[i], raw_anchor = anchor[i];
    const T raw_advantage = advantages[i], raw_weight = token_weights[i];
    const T logprob = live ? raw_logprob : T(0);
    const T base = live ? raw_anchor : T(0);
    const T advantage = live ? raw_advantage : T(0);
    const T weight = row_weight * raw_weight;
    const T delta = kKind == LossKind::kGspo ? sequence_delta : logprob - base;
    const bool selected = kUsesSelection && selections[i] != 0;
    const TokenLoss<T> t = token_loss<kKind, T>(p, logprob, base, delta, advantage, selected);
    s->value[i] = live ? t.value * weight : T(0);
    grad[i] = live ? t.grad * weight : T(0);
    s->ratio_minus_1[i] = live ? t.ratio_minus_1 : T(0);
    s->approx_kl[i] = live ? t.ratio_minus_1 - t.delta : T(0);
    const bool counts = live & (t.ratio_minus_1 == t.ratio_minus_1);
    const auto bits = bits_of(t.ratio_minus_1 + T(1));
    const auto high = counts ? bits : 0, low = counts ? bits : BitsOf<T>::kMost;
    extremes.most = high > extremes.most ? high : extremes.most;
    extremes.least = low < extremes.least ? low : extremes.least;
    num_low += live & t.clipped_low;
    num_high += live & t.clipped_high;
    num_chosen += live & t.chosen;
  }
  s->num_low = num_low;
  s->num_high = num_high;
  s->num_chosen = num_chosen;
  s->extremes = extremes;
}

template <typename T>
SKYRL_HD void any_loss_chunk(LossKind loss, const LossParams<T>& params, const Piece<T>& piece,
                             Staged<T>* s, T* grad) {
  switch (loss) {
#define SKYRL_LOSS_CASE(name) \
  case LossKind::name: return loss_chunk<LossKind::name, T>(params, piece, s, grad);
    SKYRL_LOSS_CASE(kRegular)
    SKYRL_LOSS_CASE(kDualClip)
    SKYRL_LOSS_CASE(kGspo)
    SKYRL_LOSS_CASE(kCispo)
    SKYRL_LOSS_CASE(kRolloutIs)
    SKYRL_LOSS_CASE(kClipCov)
    SKYRL_LOSS_CASE(kKlCov)
    SKYRL_LOSS_CASE(kSapo)
    SKYRL_LOSS_CASE(kDppoTv)
    SKYRL_LOSS_CASE(kDppoKl)
    SKYRL_LOSS_CASE(kCrossEntropy)
    SKYRL_LOSS_CASE(kImportanceSampling)
#undef SKYRL_LOSS_CASE
  }
}

// Fills kl and adds coef * d kl / d logprob to grad.
template <KlKind kKind, typename T>
static void kl_chunk(const T* __restrict__ logprobs, const T* __restrict__ reference,
                     const typename BitsOf<T>::Type* __restrict__ lives, int64_t n, T coef,
                     T* __restrict__ kl, T* __restrict__ grad) {
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    const bool live = lives[i] != 0;
    const T raw_logprob = logprobs[i], raw_reference = reference[i];
    const T logprob = live ? raw_logprob : T(0), base = live ? raw_reference : T(0);
    const TokenKl<T> t = token_kl<kKind, T>(logprob, base);
    kl[i] = live ? t.value : T(0);
    grad[i] += live ? coef * t.grad : T(0);
  }
}

template <typename T>
SKYRL_HD void any_kl_chunk(KlKind kind, const T* logprobs, const T* reference,
                           const typename BitsOf<T>::Type* live, int64_t n, T coef, T* kl,
                           T* grad) {
  switch (kind) {
#define SKYRL_KL_CASE(name) \
  case KlKind::name: return kl_chunk<KlKind::name, T>(logprobs, reference, live, n, coef, kl, grad);
    SKYRL_KL_CASE(kK1)
    SKYRL_KL_CASE(kAbs)
    SKYRL_KL_CASE(kK2)
    SKYRL_KL_CASE(kK3)
#undef SKYRL_KL_CASE
    case KlKind::kNone: return;
  }
}

// Narrows [*begin, *end) by whole vectors without a trained cell: padding mostly lies at one side.
template <typename Live>
SKYRL_HD void trim(const Live* live, int64_t* begin, int64_t* end) {
  const auto none = [live](int64_t i) {
    Live any = 0;
    for (int j = 0; j < kLanes; ++j) any |= live[i + j];
    return any == 0;
  };
  while (*end - *begin >= kLanes && none(*begin)) *begin += kLanes;
  while (*end - *begin >= kLanes && none(*end - kLanes)) *end -= kLanes;
}

template <typename T>
static void loss_block(const LossJob<T>& job, int64_t begin, int64_t end, LossSums* out) {
  Staged<T> s;
  LossSums sums;
  Lanes policy, ratio, approx_kl;
  Extremes<T> extremes;
  const PolicyLossInputs<T>& in = job.in;
  for_chunks(in.rows, begin, end, [&](int64_t row, int64_t chunk, int64_t length) {
    const int64_t count = read_mask(in.mask, chunk, length, s.live);
    int64_t first = 0, last = count > 0 ? length : 0;
    trim(s.live, &first, &last);
    if (job.grad != nullptr) {
      fill(job.grad + chunk, first, T(0));
      fill(job.grad + chunk + last, length - last, T(0));
    }
    if (count == 0) return;
    const int64_t cell = chunk + first, n = last - first;
    T* const grad = job.grad != nullptr ? job.grad + cell : s.grad;
    if (in.selected != nullptr) live_of(in.selected + cell, n, s.selected);
    const T row_weight = static_cast<T>(in.row_weights[row]);
    const Piece<T> piece = {
        in.logprobs + cell,
        in.anchor != nullptr ? in.anchor + cell : in.logprobs + cell,
        in.advantages != nullptr ? in.advantages + cell : kConstants<T>.zeros,
        in.token_weights != nullptr ? in.token_weights + cell : kConstants<T>.ones,
        s.live + first,
        s.selected,
        in.sequence_delta != nullptr ? static_cast<T>(in.sequence_delta[row]) : T(0),
        row_weight,
        n};
    any_loss_chunk(job.loss, job.params, piece, &s, grad);
    if (job.kl != KlKind::kNone) {
      any_kl_chunk(job.kl, piece.logprobs, in.reference + cell, piece.live, n,
                   row_weight * job.params.kl_coef, s.kl, grad);
      const double kl = fold(s.kl, n);
      sums.kl += kl;
      sums.kl_weighted += static_cast<double>(in.row_weights[row]) * kl;
    }
    accumulate(s.value, n, &policy);
    accumulate(s.ratio_minus_1, n, &ratio);
    accumulate(s.approx_kl, n, &approx_kl);
    sums.tokens += static_cast<double>(count);
    sums.low += s.num_low;
    sums.high += s.num_high;
    sums.chosen += s.num_chosen;
    if (s.extremes.most > extremes.most) extremes.most = s.extremes.most;
    if (s.extremes.least < extremes.least) extremes.least = s.extremes.least;
  });
  sums.policy = total(policy);
  sums.ratio_minus_1 = total(ratio);
  sums.approx_kl = total(approx_kl);
  sums.ratio_max = float_of<T>(extremes.most);
  sums.ratio_min = extremes.least == BitsOf<T>::kMost ? INFINITY : float_of<T>(extremes.least);
  *out = sums;
}

template <typename T>
static void kl_block(const KlJob<T>& job, int64_t begin, int64_t end) {
  Staged<T> s;
  for (int64_t cell = begin; cell < end; cell += kChunk) {
    const int64_t n = end - cell < kChunk ? end - cell : kChunk;
    T* out = job.out + cell;
    if (read_mask(job.mask, cell, n, s.live) == 0) {
      fill(out, n, T(0));
      continue;
    }
    fill(s.grad, n, T(0));
    any_kl_chunk(job.kl, job.logprobs + cell, job.reference + cell, s.live, n, T(1), s.kl, s.grad);
    if (job.grad_out == nullptr) {
      memcpy(out, s.kl, n * sizeof(T));
      continue;
    }
    const T* upstream = job.grad_out + cell;
    SKYRL_NO_OVERLAP
    for (int64_t i = 0; i < n; ++i) {
      const T product = s.grad[i] * upstream[i];
      out[i] = s.live[i] ? product : T(0);
    }
  }
}

// delta = a - b of trained cells and exp(clamp(delta)) - 1, both 0 elsewhere.
template <typename T>
static void stage_deltas(const T* __restrict__ a, const T* __restrict__ b, int64_t n,
                         Staged<T>* __restrict__ s) {
  Extremes<T> extremes;
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    const bool live = s->live[i] != 0;
    const T raw_a = a[i], raw_b = b[i];
    const T delta = (live ? raw_a : T(0)) - (live ? raw_b : T(0));
    const T excess = exp_minus_1(clamp_to(delta, T(-kMaxDelta), T(kMaxDelta)));
    s->value[i] = delta;
    s->ratio_minus_1[i] = excess;
    const bool counts = live & (delta == delta);
    const auto bits = bits_of(excess + T(1));
    const auto high = counts ? bits : 0, low = counts ? bits : BitsOf<T>::kMost;
    extremes.most = high > extremes.most ? high : extremes.most;
    extremes.least = low < extremes.least ? low : extremes.least;
  }
  s->extremes = extremes;
}

// One row's statistics. Squared deviations are merged chunk by chunk from centred sums (Chan et
// al.), so that ratios near 1 keep their variance.
template <typename T>
static void delta_rows(const DeltaJob<T>& job, int64_t begin, int64_t end, double* stats) {
  Staged<T> s;
  for (int64_t row = begin; row < end; ++row) {
    double* out = stats + row * kNumDeltaStats;
    for (int i = 0; i < kNumDeltaStats; ++i) out[i] = 0.0;
    out[kDeltaRatioMin] = INFINITY;
  }
  for_chunks(
      job.rows, offset_of(job.rows, begin), offset_of(job.rows, end),
      [&](int64_t row, int64_t cell, int64_t n) {
        const int64_t count = read_mask(job.mask, cell, n, s.live);
        if (count == 0) return;
        double* out = stats + row * kNumDeltaStats;
        stage_deltas(job.a + cell, job.b + cell, n, &s);
        out[kDeltaSum] += fold(s.value, n);
        const double most = float_of<T>(s.extremes.most), least = float_of<T>(s.extremes.least);
        if (most > out[kDeltaRatioMax]) out[kDeltaRatioMax] = most;
        if (s.extremes.least != BitsOf<T>::kMost && least < out[kDeltaRatioMin]) {
          out[kDeltaRatioMin] = least;
        }
        const double added = static_cast<double>(count), before = out[kDeltaCount];
        const double sum = fold(s.ratio_minus_1, n), mean = sum / added;
        SKYRL_NO_OVERLAP
        for (int64_t i = 0; i < n; ++i) {
          const T deviation = s.ratio_minus_1[i] - static_cast<T>(mean);
          s.approx_kl[i] = s.live[i] ? deviation * deviation : T(0);
        }
        const double gap = before > 0 ? mean - out[kDeltaRatioSum] / before : 0.0;
        out[kDeltaRatioSq] += fold(s.approx_kl, n) + gap * gap * before * added / (before + added);
        out[kDeltaRatioSum] += sum;
        out[kDeltaCount] += added;
      });
}

template <typename T>
static void correct_chunk(const TokenCorrection<T>& c, int64_t n, uint8_t* __restrict__ new_mask,
                          Staged<T>* __restrict__ s, double* row) {
  const bool bounded = c.bounded;
  const T low = c.ratio_low, high = c.ratio_high, cap = c.cap;
  int32_t kept = 0, dropped = 0, capped = 0;
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    const bool live = s->live[i] != 0;
    const T ratio = s->ratio_minus_1[i] + T(1);
    const bool inside = (ratio >= low) & (ratio <= high);
    const bool keep = live & (inside | !bounded);
    const bool over = ratio > cap;
    const T weight = over ? cap : ratio;
    new_mask[i] = keep;
    s->value[i] = keep ? s->value[i] : T(0);
    s->grad[i] = keep ? weight : T(0);
    kept += keep;
    dropped += live & !keep;
    capped += keep & over;
  }
  row[0] += fold(s->value, n);
  row[1] += kept;
  row[2] += dropped;
  row[3] += capped;
}

template <typename T>
static void correct_rows(const CorrectionJob<T>& job, int64_t begin, int64_t end, double* stats) {
  Staged<T> s;
  const DeltaJob<T>& d = job.delta;
  fill(stats + begin * kNumCorrectionStats, (end - begin) * kNumCorrectionStats, 0.0);
  for_chunks(d.rows, offset_of(d.rows, begin), offset_of(d.rows, end),
             [&](int64_t row, int64_t cell, int64_t n) {
               uint8_t* new_mask = job.new_mask + cell;
               T* weights = job.weights != nullptr ? job.weights + cell : nullptr;
               if (!job.correction.keep_row[row] || read_mask(d.mask, cell, n, s.live) == 0) {
                 memset(new_mask, 0, n);
                 if (weights != nullptr) fill(weights, n, T(0));
                 return;
               }
               stage_deltas(d.a + cell, d.b + cell, n, &s);
               correct_chunk(job.correction, n, new_mask, &s, stats + row * kNumCorrectionStats);
               if (weights != nullptr) memcpy(weights, s.grad, n * sizeof(T));
             });
}

static void count_rows(const LossMask& mask, const RowLayout& rows, int64_t begin, int64_t end,
                       int64_t* counts) {
  int32_t live[kChunk];
  fill(counts + begin, end - begin, int64_t{0});
  for_chunks(
      rows, offset_of(rows, begin), offset_of(rows, end),
      [&](int64_t row, int64_t cell, int64_t n) { counts[row] += read_mask(mask, cell, n, live); });
}

template <typename T>
constexpr BlockKernels<T> kKernels = {loss_block<T>, kl_block<T>, delta_rows<T>, correct_rows<T>};
const BlockKernelSet kKernelSet = {kKernels<float>, count_rows};

}  // namespace

#if defined(SKYRL_SIMD_AVX512)
const BlockKernelSet& policy_loss_blocks_avx512() { return kKernelSet; }
#elif defined(SKYRL_SIMD_AVX2)
const BlockKernelSet& policy_loss_blocks_avx2() { return kKernelSet; }
#else
const BlockKernelSet& policy_loss_blocks_baseline() { return kKernelSet; }
const BlockKernels<double>& policy_loss_blocks_float64() { return kKernels<double>; }
#endif

}  // namespace skyrl_fast
