// Token-level credit on the CPU: one pass from the last token to the first, one more to normalise.
#include <vector>

#include "credit.h"

namespace skyrl_fast {
namespace {

// Of the trained tokens of one row; squares are deviations from the row's own mean.
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

// Where the chain stands: it runs from the last trained token of a trajectory to the first.
struct Link {
  double advantage = 0.0;  // of the trained token after this one
  double value = 0.0;      // of the same token
  double reward = 0.0;     // came after the trained token that is still to be found
};

template <typename Mask>
inline bool is_trained(const Mask* mask, int64_t t) {
  return mask == nullptr || mask[t] != 0;
}

template <typename Mask>
void chain_row(const TokenChain<Mask>& c, int64_t row, Link* link) {
  const int64_t offset = c.layout.offset(row), length = c.layout.length(row);
  const float* rewards = c.rewards_per_row ? nullptr : c.rewards + c.rewards_layout.offset(row);
  const float* values = c.values ? c.values + offset : nullptr;
  const Mask* mask = c.mask ? c.mask + offset : nullptr;
  float* advantages = c.advantages + offset;
  float* returns = c.returns ? c.returns + offset : nullptr;
  const double decay = c.gamma * c.lambda;
  Link l = *link;
  if (c.rewards_per_row) l.reward += c.rewards[row];
  for (int64_t t = length - 1; t >= 0; --t) {
    if (rewards) l.reward += rewards[t];
    if (!is_trained(mask, t)) {
      advantages[t] = 0.0f;
      if (returns) returns[t] = 0.0f;
      continue;
    }
    const double value = values ? values[t] : 0.0;
    l.advantage = l.reward + c.gamma * l.value - value + decay * l.advantage;
    l.value = value;
    l.reward = 0.0;
    advantages[t] = static_cast<float>(l.advantage);
    if (returns) returns[t] = static_cast<float>(l.advantage + value);
  }
  *link = l;
}

// After a trajectory whose chain came out as not finite: say which row began it.
template <typename Mask>
[[noreturn]] void refuse_row(const TokenChain<Mask>& c, int64_t first, int64_t last) {
  for (int64_t row = last; row >= first; --row) {
    const double reward = c.rewards_per_row ? static_cast<double>(c.rewards[row])
                                            : cell_sum(c.rewards + c.rewards_layout.offset(row),
                                                       c.rewards_layout.length(row));
    if (!std::isfinite(reward)) refuse_rewards(c.op, row, reward);
    const int64_t offset = c.layout.offset(row);
    for (int64_t t = offset; c.values && t < offset + c.layout.length(row); ++t) {
      if (is_trained(c.mask, t) && !std::isfinite(c.values[t])) {
        throw std::invalid_argument(std::string(c.op) +
                                    ": values of trained tokens must be finite, but row " +
                                    std::to_string(row) + " has " + std::to_string(c.values[t]));
      }
    }
  }
  throw std::invalid_argument(std::string(c.op) + ": the returns of the trajectory of row " +
                              std::to_string(first) + " are too large");
}

template <typename Mask>
Moments row_moments(const TokenChain<Mask>& c, int64_t row) {
  const int64_t offset = c.layout.offset(row), length = c.layout.length(row);
  const float* values = c.advantages + offset;
  const Mask* mask = c.mask ? c.mask + offset : nullptr;
  Moments m;
  for (int64_t t = 0; t < length; ++t) m.count += is_trained(mask, t);
  if (m.count == 0) return m;
  m.mean = cell_sum(values, length) / static_cast<double>(m.count);  // 0 where not trained
  for (int64_t t = 0; t < length; ++t) {
    const double deviation = is_trained(mask, t) ? values[t] - m.mean : 0.0;
    m.squares += deviation * deviation;
  }
  return m;
}

template <typename Mask>
void scale_rows(const TokenChain<Mask>& c, const Moments& all, int num_threads) {
  if (all.count == 0) return;
  const double variance = all.squares / static_cast<double>(all.count);
  const double factor = 1.0 / std::sqrt(std::max(variance, kMinVariance));
  const int64_t grain = kRowCellsPerThread / c.layout.mean_length() + 1;
  parallel_for(num_threads, c.layout.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = c.layout.offset(begin); t < c.layout.offset(end); ++t) {
      const float scaled = static_cast<float>((c.advantages[t] - all.mean) * factor);
      c.advantages[t] = is_trained(c.mask, t) ? scaled : 0.0f;
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
  const int64_t num_trajectories = static_cast<int64_t>(starts.size()) - 1;
  const int64_t cells = n == 0 ? 0 : c.layout.offset(n) / std::max<int64_t>(1, num_trajectories);
  const int64_t grain = kRowCellsPerThread / std::max<int64_t>(1, cells) + 1;
  parallel_for(num_threads, num_trajectories, grain, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      Link link;
      for (int64_t row = starts[j + 1] - 1; row >= starts[j]; --row) {
        chain_row(c, row, &link);
        if (normalize) moments[row] = row_moments(c, row);
      }
      // What is not finite stays so to the end of the chain.
      if (!std::isfinite(link.advantage + link.value + link.reward)) {
        refuse_row(c, starts[j], starts[j + 1] - 1);
      }
    }
  });
  if (!normalize) return;
  Moments all;
  for (const Moments& row : moments) all.add(row);  // in row order, whatever the threads
  scale_rows(c, all, num_threads);
}

#define SKYRL_INSTANTIATE(Mask) \
  template void token_chain_cpu<Mask>(const TokenChain<Mask>&, bool, int);
SKYRL_INSTANTIATE(uint8_t)
SKYRL_INSTANTIATE(int64_t)
SKYRL_INSTANTIATE(float)
#undef SKYRL_INSTANTIATE

}  // namespace skyrl_fast
