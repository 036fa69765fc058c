// Blocks of cells: loss, gradient, KL and statistics. Compiled once per SIMD level.
//
// Plain scalar loops over the per-token functions of token_loss.h, which the compiler vectorises.
// All linkage is internal, see cell_chunks.h.
#include "policy_loss/policy_loss_blocks.h"

#include "policy_loss/cell_chunks.h"

namespace skyrl_fast {
namespace {

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
  typename BitsOf<T>::Type stream[kChunk];  // tokens of a stream, where these are not all live ones
  T grad[kChunk];  // of the KL penalty, for kl_block; scratch without a gradient
  T kl[kChunk];
  T weighted[kChunk], slope[kChunk];  // of a stream with weights
  // of one chunk: a few dozen addends per lane, so in the precision of the addends
  T value, ratio_minus_1, approx_kl;
  int32_t num_low, num_high, num_chosen;
  Extremes<T> extremes;
};

// One row's piece: pointers to its cells.
template <typename T>
struct Piece {
  const T* logprobs;
  const T* old_logprobs;
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
  const T* __restrict__ old_logprobs = piece.old_logprobs;
  const T* __restrict__ advantages = piece.advantages;
  const T* __restrict__ token_weights = piece.token_weights;
  const typename BitsOf<T>::Type* __restrict__ lives = piece.live;
  const typename BitsOf<T>::Type* __restrict__ selections = piece.selected;
  const T sequence_delta = piece.sequence_delta, row_weight = piece.row_weight;
  const int64_t n = piece.n;
  T sum = T(0), ratio_minus_1 = T(0), approx_kl = T(0);
  int32_t num_low = 0, num_high = 0, num_chosen = 0;
  typename BitsOf<T>::Type most = 0, least = BitsOf<T>::kMost;
#pragma omp simd reduction(+ : sum, ratio_minus_1, approx_kl, num_low, num_high, num_chosen) \
    reduction(max : most) reduction(min : least)
  for (int64_t i = 0; i < n; ++i) {
    const bool live = lives[i] != 0;
    const T raw_logprob = logprobs[i], raw_old = old_logprobs[i];
    const T raw_advantage = advantages[i], raw_weight = token_weights[i];
    const T logprob = live ? raw_logprob : T(0);
    const T old_logprob = live ? raw_old : T(0);
    const T advantage = live ? raw_advantage : T(0);
    const T weight = row_weight * raw_weight;
    const bool weighed = live & (raw_weight != T(0));
    const T delta = kKind == LossKind::kGspo ? sequence_delta : logprob - old_logprob;
    const bool selected = kUsesSelection && selections[i] != 0;
    const TokenLoss<T> t =
        token_loss<kKind, T>(p, logprob, old_logprob, delta, advantage, selected);
    sum += weighed ? t.value * weight : T(0);
    grad[i] = weighed ? t.grad * weight : T(0);
    ratio_minus_1 += live ? t.ratio_minus_1 : T(0);
    approx_kl += live ? t.ratio_minus_1 - t.delta : T(0);
    const bool counts = live & (t.ratio == t.ratio);
    const auto bits = bits_of(t.ratio);
    const auto high = counts ? bits : 0, low = counts ? bits : BitsOf<T>::kMost;
    most = high > most ? high : most;
    least = low < least ? low : least;
    num_low += live & t.clipped_low;
    num_high += live & t.clipped_high;
    num_chosen += live & t.chosen;
  }
  s->value = sum;
  s->ratio_minus_1 = ratio_minus_1;
  s->approx_kl = approx_kl;
  s->num_low = num_low;
  s->num_high = num_high;
  s->num_chosen = num_chosen;
  s->extremes.most = most;
  s->extremes.least = least;
}

template <typename T>
SKYRL_HD void any_loss_chunk(LossKind loss, const LossParams<T>& params, const Piece<T>& piece,
                             Staged<T>* s, T* grad) {
  switch (loss) {
#define SKYRL_LOSS_CASE(name) \
  case LossKind::name: return loss_chunk<LossKind::name, T>(params, piece, s, grad);
    SKYRL_EACH_LOSS(SKYRL_LOSS_CASE)
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
    const T logprob = live ? raw_logprob : T(0), ref = live ? raw_reference : T(0);
    const TokenKl<T> t = token_kl<kKind, T>(logprob, ref);
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

// stream[i] = lives[i] where the weight is not 0; returns how many are.
template <typename T>
static int64_t weighted_of(const T* __restrict__ weights,
                           const typename BitsOf<T>::Type* __restrict__ lives, int64_t n,
                           typename BitsOf<T>::Type* __restrict__ stream) {
  int32_t count = 0;
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    stream[i] = (lives[i] != 0) & (weights[i] != T(0));
    count += static_cast<int32_t>(stream[i]);
  }
  return count;
}

// The KL penalty of a chunk: its sums, and coef * weight * d kl / d logprob added to grad.
template <typename T>
static void add_kl(const LossJob<T>& job, const Piece<T>& piece, const T* reference,
                   const T* weights, int64_t count, Staged<T>* s, LossSums* sums, T* grad) {
  const T coef = piece.row_weight * job.params.kl_coef;
  const int64_t n = piece.n;
  const double row_weight = static_cast<double>(piece.row_weight);
  if (weights == nullptr) {
    any_kl_chunk(job.kl, piece.logprobs, reference, piece.live, n, coef, s->kl, grad);
    const double kl = fold(s->kl, n);
    sums->kl += kl;
    sums->kl_weighted += row_weight * kl;
    sums->kl_tokens += static_cast<double>(count);
    return;
  }
  sums->kl_tokens += static_cast<double>(weighted_of(weights, piece.live, n, s->stream));
  fill(s->slope, n, T(0));
  any_kl_chunk(job.kl, piece.logprobs, reference, s->stream, n, T(1), s->kl, s->slope);
  const T *kl = s->kl, *slope = s->slope;
  const typename BitsOf<T>::Type* stream = s->stream;
  T* weighted = s->weighted;
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    const T raw_weight = weights[i];
    const T weight = stream[i] ? raw_weight : T(0);
    weighted[i] = weight * kl[i];
    grad[i] += coef * weight * slope[i];
  }
  sums->kl += fold(s->kl, n);
  sums->kl_weighted += row_weight * fold(s->weighted, n);
}

// The cross-entropy of a chunk: its sums, and its gradient added to grad.
template <typename T>
static void add_cross_entropy(const Piece<T>& piece, const T* weights, Staged<T>* s, LossSums* sums,
                              T* grad) {
  const int64_t n = piece.n;
  const T row_weight = piece.row_weight;
  sums->cross_entropy_tokens += static_cast<double>(weighted_of(weights, piece.live, n, s->stream));
  const T* logprobs = piece.logprobs;
  const typename BitsOf<T>::Type* stream = s->stream;
  T *value = s->kl, *weighted = s->weighted;
  SKYRL_NO_OVERLAP
  for (int64_t i = 0; i < n; ++i) {
    const T raw_logprob = logprobs[i], raw_weight = weights[i];
    const T weight = stream[i] ? raw_weight : T(0);
    value[i] = stream[i] ? -raw_logprob : T(0);
    weighted[i] = weight * value[i];
    grad[i] -= row_weight * weight;
  }
  sums->cross_entropy += fold(s->kl, n);
  sums->cross_entropy_weighted += static_cast<double>(row_weight) * fold(s->weighted, n);
}

template <typename T>
static void loss_block(const LossJob<T>& job, int64_t begin, int64_t end, LossSums* out) {
  Staged<T> s;
  LossSums sums;
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
    Piece<T> piece = {in.logprobs + cell,
                      in.old_logprobs != nullptr ? in.old_logprobs + cell : in.logprobs + cell,
                      in.advantages != nullptr ? in.advantages + cell : kConstants<T>.zeros,
                      in.token_weights != nullptr ? in.token_weights + cell : kConstants<T>.ones,
                      s.live + first,
                      s.selected,
                      in.sequence_delta != nullptr ? static_cast<T>(in.sequence_delta[row]) : T(0),
                      in.row_weights[row],
                      n};
    int64_t policy_tokens = count;
    if (in.cross_entropy_weights != nullptr && in.token_weights != nullptr) {
      policy_tokens = weighted_of(piece.token_weights, piece.live, n, s.stream);
      piece.live = s.stream;
    }
    any_loss_chunk(job.loss, job.params, piece, &s, grad);
    piece.live = s.live + first;
    if (job.kl != KlKind::kNone) {
      const T* kl_weights = in.kl_weights != nullptr ? in.kl_weights + cell : nullptr;
      add_kl(job, piece, in.reference + cell, kl_weights, count, &s, &sums, grad);
    }
    if (in.cross_entropy_weights != nullptr) {
      add_cross_entropy(piece, in.cross_entropy_weights + cell, &s, &sums, grad);
    }
    sums.policy += s.value;
    sums.ratio_minus_1 += s.ratio_minus_1;
    sums.approx_kl += s.approx_kl;
    sums.tokens += static_cast<double>(count);
    sums.policy_tokens += static_cast<double>(policy_tokens);
    sums.low += s.num_low;
    sums.high += s.num_high;
    sums.chosen += s.num_chosen;
    if (s.extremes.most > extremes.most) extremes.most = s.extremes.most;
    if (s.extremes.least < extremes.least) extremes.least = s.extremes.least;
  });
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

template <typename T>
static void delta_rows(const DeltaJob<T>& job, int64_t begin, int64_t end, double* sums) {
  typename BitsOf<T>::Type live[kChunk];
  T delta[kChunk];
  fill(sums + 2 * begin, 2 * (end - begin), 0.0);
  for_chunks(job.rows, offset_of(job.rows, begin), offset_of(job.rows, end),
             [&](int64_t row, int64_t cell, int64_t n) {
               const int64_t count = read_mask(job.mask, cell, n, live);
               if (count == 0) return;
               const T* a = job.a + cell;
               const T* b = job.b + cell;
               SKYRL_NO_OVERLAP
               for (int64_t i = 0; i < n; ++i) {
                 const T raw_a = a[i], raw_b = b[i];
                 delta[i] = (live[i] ? raw_a : T(0)) - (live[i] ? raw_b : T(0));
               }
               sums[2 * row] += fold(delta, n);
               sums[2 * row + 1] += static_cast<double>(count);
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
constexpr BlockKernels<T> kKernels = {loss_block<T>, kl_block<T>, delta_rows<T>};
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
