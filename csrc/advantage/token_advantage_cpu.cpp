// Token-level advantages on the CPU: one pass from the last token to the first, one more to
// normalise.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "advantage/token_advantage.h"

namespace skyrl_fast {
namespace {

// Of the trained tokens of one row; `squares` sums squared deviations from the row's mean.
struct Moments {
  int64_t count = 0;
  double mean = 0.0, squares = 0.0;

  // Chan, Golub and LeVeque: no difference of large squares.
  void add(const Moments& other) {
    if (other.count == 0) return;
    const double total = static_cast<double>(count + other.count);
    const double delta = other.mean - mean;
    const double share = static_cast<double>(other.count) / total;
    squares += other.squares + delta * delta * share * static_cast<double>(count);
    mean += delta * share;
    count += other.count;
  }
};

// State of the chain, which runs from the last trained token of a trajectory to the first.
struct Link {
  double advantage = 0.0;  // of the trained token after this one
  double value = 0.0;      // of the same token
  double reward = 0.0;     // of the tokens since then; belongs to the trained token before them
};

template <typename Mask>
inline bool is_trained(const Mask* mask, int64_t t) {
  return mask == nullptr || mask[t] != 0;
}

constexpr int kBlock = 8;  // cells
constexpr float kNoRewards[kBlock] = {};

enum class Trained { kNone, kSome, kAll };

// Classifies a block's cells. Integers are tested together: a bit that all share means that none is
// 0. Where they share none although none is 0, the result is kSome: also correct, only slower.
template <typename Mask>
inline Trained trained_in_block(const Mask* mask) {
  if (mask == nullptr) return Trained::kAll;
  if constexpr (std::is_integral_v<Mask>) {
    Mask all = mask[0], any = mask[0];
    for (int i = 1; i < kBlock; ++i) {
      all &= mask[i];
      any |= mask[i];
    }
    return any == 0 ? Trained::kNone : all != 0 ? Trained::kAll : Trained::kSome;
  }
  int count = 0;
  for (int i = 0; i < kBlock; ++i) count += mask[i] != 0;
  return count == 0 ? Trained::kNone : count == kBlock ? Trained::kAll : Trained::kSome;
}

// Sums of a row's trained advantages for its moments, in independent lanes, over the float32
// results, so that equal ones have variance 0.
// Deviations are from one of the advantages. Its squared distance from the mean is at most the sum
// of all squared deviations, so the difference in moments() loses at most log2(count) bits.
struct RowSums {
  int64_t count = 0;
  double origin = 0.0;
  double sum[kBlock] = {}, squares[kBlock] = {};

  void add(float advantage) {
    if (count++ == 0) origin = advantage;
    const double d = advantage - origin;
    sum[0] += d;
    squares[0] += d * d;
  }
  void add_block(const float* advantages) {
    if (count == 0) origin = advantages[kBlock - 1];
    count += kBlock;
    for (int i = 0; i < kBlock; ++i) {
      const double d = advantages[i] - origin;
      sum[i] += d;
      squares[i] += d * d;
    }
  }
  Moments moments() const {
    Moments m;
    if (count == 0) return m;
    double total = 0.0, total_squares = 0.0;
    for (int i = 0; i < kBlock; ++i) {
      total += sum[i];
      total_squares += squares[i];
    }
    const double shift = total / static_cast<double>(count);
    m.count = count;
    m.mean = origin + shift;
    m.squares = std::max(0.0, total_squares - shift * total);
    return m;
  }
};

// Token by token, each step would wait for a multiplication and an addition; eight trained tokens
// together are a suffix sum in three doubling steps, plus one step from the block after them.
class BlockChain {
 public:
  BlockChain(double gamma, double decay) : gamma_(gamma) {
    double power = 1.0;
    for (int i = 1; i <= kBlock; ++i) powers_[i] = power *= decay;
  }

  void run(const float* rewards, const float* values, Link* link, float* advantages, float* returns,
           RowSums* sums) const {
    double value[kBlock + 1] = {}, sum[kBlock];
    if (values) {
      for (int i = 0; i < kBlock; ++i) value[i] = values[i];
    }
    value[kBlock] = link->value;
    for (int i = 0; i < kBlock; ++i) sum[i] = rewards[i] + gamma_ * value[i + 1] - value[i];
    sum[kBlock - 1] += link->reward;
    for (int i = 0; i < kBlock - 1; ++i) sum[i] += powers_[1] * sum[i + 1];
    for (int i = 0; i < kBlock - 2; ++i) sum[i] += powers_[2] * sum[i + 2];
    for (int i = 0; i < kBlock - 4; ++i) sum[i] += powers_[4] * sum[i + 4];
    for (int i = 0; i < kBlock; ++i) sum[i] += powers_[kBlock - i] * link->advantage;
    for (int i = 0; i < kBlock; ++i) advantages[i] = static_cast<float>(sum[i]);
    if (returns) {
      for (int i = 0; i < kBlock; ++i) returns[i] = static_cast<float>(sum[i] + value[i]);
    }
    if (sums) sums->add_block(advantages);
    *link = {sum[0], value[0], 0.0};
  }

 private:
  double gamma_;
  double powers_[kBlock + 1] = {};  // powers of the decay
};

template <typename Mask>
void chain_row(const TokenChain<Mask>& c, int64_t row, const BlockChain& blocks, Link* link,
               RowSums* sums) {
  const int64_t offset = c.layout.offset(row);
  const float* rewards = c.rewards_per_row ? nullptr : c.rewards + c.rewards_layout.offset(row);
  const float* values = c.values ? c.values + offset : nullptr;
  const Mask* mask = c.mask ? c.mask + offset : nullptr;
  float* advantages = c.advantages + offset;
  float* returns = c.returns ? c.returns + offset : nullptr;
  const double decay = c.gamma * c.lambda;
  Link l = *link;
  if (c.rewards_per_row) l.reward += c.rewards[row];
  const auto one_cell = [&](int64_t t) {
    if (rewards) l.reward += rewards[t];
    if (!is_trained(mask, t)) {
      advantages[t] = 0.0f;
      if (returns) returns[t] = 0.0f;
      return;
    }
    const double value = values ? values[t] : 0.0;
    l.advantage = l.reward + c.gamma * l.value - value + decay * l.advantage;
    l.value = value;
    l.reward = 0.0;
    advantages[t] = static_cast<float>(l.advantage);
    if (returns) returns[t] = static_cast<float>(l.advantage + value);
    if (sums) sums->add(advantages[t]);
  };
  int64_t t = c.layout.length(row);
  for (; t >= kBlock; t -= kBlock) {
    const int64_t at = t - kBlock;
    const Trained trained = trained_in_block(mask ? mask + at : nullptr);
    if (trained == Trained::kAll) {
      blocks.run(rewards ? rewards + at : kNoRewards, values ? values + at : nullptr, &l,
                 advantages + at, returns ? returns + at : nullptr, sums);
    } else if (trained == Trained::kNone) {
      if (rewards) l.reward += row_loops().sum(rewards + at, kBlock);
      std::fill_n(advantages + at, kBlock, 0.0f);
      if (returns) std::fill_n(returns + at, kBlock, 0.0f);
    } else {
      for (int64_t i = t - 1; i >= at; --i) one_cell(i);
    }
  }
  for (--t; t >= 0; --t) one_cell(t);
  *link = l;
}

// For a trajectory whose chain is not finite: throws an error that names the row it began in.
template <typename Mask>
[[noreturn]] void refuse_row(const TokenChain<Mask>& c, int64_t first, int64_t last) {
  for (int64_t row = last; row >= first; --row) {
    const double reward = c.rewards_per_row
                              ? static_cast<double>(c.rewards[row])
                              : row_loops().sum(c.rewards + c.rewards_layout.offset(row),
                                                c.rewards_layout.length(row));
    if (!std::isfinite(reward)) refuse_rewards(c.op, row, reward);
    const int64_t offset = c.layout.offset(row);
    for (int64_t t = offset; c.values && t < offset + c.layout.length(row); ++t) {
      if (is_trained(c.mask, t) && !std::isfinite(c.values[t])) {
        throw std::invalid_argument(std::string(c.op) +
                                    ": values: expected finite ones for trained tokens, but row " +
                                    std::to_string(row) + " has " + std::to_string(c.values[t]));
      }
    }
  }
  throw std::invalid_argument(std::string(c.op) + ": the returns of the trajectory of row " +
                              std::to_string(first) + " are too large");
}

template <typename Mask>
void scale_rows(const TokenChain<Mask>& c, const Moments& all, int num_threads) {
  if (all.count == 0) return;
  const double variance = all.squares / static_cast<double>(all.count);
  const double factor = 1.0 / std::sqrt(std::max(variance, kMinVariance));
  const int64_t grain = kRowCellsPerThread / c.layout.mean_length() + 1;
  parallel_for(num_threads, c.layout.num_rows, grain, [&](int64_t begin, int64_t end) {
    const auto scale = [&](int64_t t) {
      c.advantages[t] = static_cast<float>((c.advantages[t] - all.mean) * factor);
    };
    int64_t t = c.layout.offset(begin);
    const int64_t stop = c.layout.offset(end);
    for (; t + kBlock <= stop; t += kBlock) {
      const Trained trained = trained_in_block(c.mask ? c.mask + t : nullptr);
      if (trained == Trained::kNone) continue;  // 0 already
      for (int i = 0; i < kBlock; ++i) {
        if (trained == Trained::kAll || is_trained(c.mask, t + i)) scale(t + i);
      }
    }
    for (; t < stop; ++t) {
      if (is_trained(c.mask, t)) scale(t);
    }
  });
}

}  // namespace

template <typename Mask>
void token_chain_cpu(const TokenChain<Mask>& c, bool normalize, int num_threads) {
  const int64_t n = c.layout.num_rows;
  check_trajectories(c.op, nullptr, c.is_last_step, n);
  std::vector<int64_t> starts;  // first row of each trajectory, and n
  starts.reserve(n + 1);
  starts.push_back(0);
  for (int64_t row = 0; row < n; ++row) {
    if (c.is_last_step == nullptr || c.is_last_step[row]) starts.push_back(row + 1);
  }
  std::vector<Moments> moments(normalize ? n : 0);
  const BlockChain blocks(c.gamma, c.gamma * c.lambda);
  const int64_t num_trajectories = static_cast<int64_t>(starts.size()) - 1;
  const int64_t cells = n == 0 ? 0 : c.layout.offset(n) / std::max<int64_t>(1, num_trajectories);
  const int64_t grain = kRowCellsPerThread / std::max<int64_t>(1, cells) + 1;
  parallel_for(num_threads, num_trajectories, grain, [&](int64_t begin, int64_t end) {
    for (int64_t j = end - 1; j >= begin; --j) {  // also backwards: one stream of memory
      Link link;
      for (int64_t row = starts[j + 1] - 1; row >= starts[j]; --row) {
        RowSums sums;
        chain_row(c, row, blocks, &link, normalize ? &sums : nullptr);
        if (normalize) moments[row] = sums.moments();
      }
      // Once not finite, the chain stays so to its end.
      if (!std::isfinite(link.advantage + link.value + link.reward)) {
        refuse_row(c, starts[j], starts[j + 1] - 1);
      }
    }
  });
  if (!normalize) return;
  Moments all;
  for (const Moments& row : moments) all.add(row);  // in row order, for any number of threads
  scale_rows(c, all, num_threads);
}

#define SKYRL_INSTANTIATE(Mask) \
  template void token_chain_cpu<Mask>(const TokenChain<Mask>&, bool, int);
SKYRL_INSTANTIATE(uint8_t)
SKYRL_INSTANTIATE(int64_t)
SKYRL_INSTANTIATE(float)
#undef SKYRL_INSTANTIATE

}  // namespace skyrl_fast
