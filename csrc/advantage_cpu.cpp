// Group-wise advantages on the CPU: one pass over the last rows, one over the output.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "advantage.h"
#include "parallel.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kCellsPerThread = 1 << 19;  // below this a thread costs more than it saves

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("group_advantage: " + what);
}

// Four floats, and the same four as doubles; compilers choose the registers.
typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));

inline void add_doubles(const float* p, Doubles* sum) {
  Floats v;
  std::memcpy(&v, p, sizeof(v));  // rows start anywhere
  *sum += __builtin_convertvector(v, Doubles);
}

// Independent partial sums, combined in a fixed order: one running sum would wait for itself.
double row_score(const float* rewards, int64_t length) {
  constexpr int kLanes = 4;
  Doubles a{}, b{}, c{}, d{};
  int64_t t = 0;
  for (; t + 4 * kLanes <= length; t += 4 * kLanes) {
    add_doubles(rewards + t, &a);
    add_doubles(rewards + t + kLanes, &b);
    add_doubles(rewards + t + 2 * kLanes, &c);
    add_doubles(rewards + t + 3 * kLanes, &d);
  }
  a = (a + b) + (c + d);
  double sum = (a[0] + a[1]) + (a[2] + a[3]);
  for (; t < length; ++t) sum += rewards[t];
  return sum;
}

struct Trajectories {
  std::vector<int64_t> of_row;  // row -> trajectory
  std::vector<double> score;    // per trajectory
  std::vector<int64_t> group;   // per trajectory, dense group number
  int64_t num_groups = 0;
};

Trajectories read_trajectories(const float* rewards, const RowLayout& layout,
                               const int64_t* group_ids, const uint8_t* is_last_step) {
  const int64_t n = layout.num_rows;
  Trajectories t;
  t.of_row.resize(n);
  t.score.reserve(n);
  t.group.reserve(n);
  std::unordered_map<int64_t, int64_t> dense;
  dense.reserve(n / 2 + 1);
  int64_t last_id = 0, last_dense = -1;
  for (int64_t row = 0; row < n; ++row) {
    t.of_row[row] = static_cast<int64_t>(t.score.size());
    if (is_last_step != nullptr && !is_last_step[row]) {
      if (row + 1 == n) refuse("is_last_step must be True in the last row, got False");
      if (group_ids[row + 1] != group_ids[row]) {
        refuse("group_ids must be equal within a trajectory, but row " + std::to_string(row) +
               " (not a last step) and row " + std::to_string(row + 1) + " differ");
      }
      continue;
    }
    const double score = row_score(rewards + layout.offset(row), layout.length(row));
    if (!std::isfinite(score)) {
      refuse("rewards must be finite, but those of row " + std::to_string(row) + " sum to " +
             std::to_string(score));
    }
    if (last_dense < 0 || group_ids[row] != last_id) {
      last_id = group_ids[row];
      last_dense = dense.try_emplace(last_id, static_cast<int64_t>(dense.size())).first->second;
    }
    t.score.push_back(score);
    t.group.push_back(last_dense);
  }
  t.num_groups = static_cast<int64_t>(dense.size());
  return t;
}

// Two passes: the squared deviations are taken from the mean itself, so that groups whose scores
// are nearly equal keep their variance.
std::vector<float> trajectory_advantages(const Trajectories& t, Estimator estimator) {
  const int64_t num = static_cast<int64_t>(t.score.size());
  std::vector<int64_t> count(t.num_groups);
  std::vector<double> mean(t.num_groups), std(t.num_groups);
  for (int64_t j = 0; j < num; ++j) {
    ++count[t.group[j]];
    mean[t.group[j]] += t.score[j];
  }
  for (int64_t g = 0; g < t.num_groups; ++g) mean[g] /= static_cast<double>(count[g]);
  for (int64_t j = 0; j < num; ++j) {
    const double deviation = t.score[j] - mean[t.group[j]];
    std[t.group[j]] += deviation * deviation;
  }
  for (int64_t g = 0; g < t.num_groups; ++g) {
    std[g] = count[g] > 1 ? std::sqrt(std[g] / static_cast<double>(count[g] - 1)) : 1.0;
  }
  std::vector<float> advantage(num);
  for (int64_t j = 0; j < num; ++j) {
    const int64_t g = t.group[j];
    advantage[j] =
        static_cast<float>(advantage_of(estimator, t.score[j], mean[g], std[g], count[g]));
  }
  return advantage;
}

// Masks are 0/1 (or small weights): 32 bits hold them, and convert in vectors where 64 do not.
inline float mask_value(int64_t m) { return static_cast<float>(static_cast<int32_t>(m)); }
inline float mask_value(uint8_t m) { return static_cast<float>(m); }
inline float mask_value(float m) { return m; }

template <typename Mask>
void broadcast_row(float advantage, const Mask* __restrict__ mask, int64_t length,
                   float* __restrict__ out) {
  if (mask == nullptr) {
    for (int64_t t = 0; t < length; ++t) out[t] = advantage;
  } else {
    for (int64_t t = 0; t < length; ++t) out[t] = advantage * mask_value(mask[t]);
  }
}

}  // namespace

template <typename Mask>
void group_advantage_cpu(const float* rewards, const RowLayout& rewards_layout,
                         const int64_t* group_ids, const uint8_t* is_last_step, const Mask* mask,
                         Estimator estimator, const RowLayout& out_layout, float* out,
                         int num_threads) {
  const int64_t n = rewards_layout.num_rows;
  if (n == 0) return;
  const Trajectories t = read_trajectories(rewards, rewards_layout, group_ids, is_last_step);
  const std::vector<float> advantage = trajectory_advantages(t, estimator);
  const int64_t mean_length = std::max<int64_t>(1, out_layout.offset(n) / n);
  parallel_for(num_threads, n, kCellsPerThread / mean_length + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t offset = out_layout.offset(row);
      broadcast_row(advantage[t.of_row[row]], mask ? mask + offset : nullptr,
                    out_layout.length(row), out + offset);
    }
  });
}

#define SKYRL_INSTANTIATE(Mask)                                                           \
  template void group_advantage_cpu<Mask>(const float*, const RowLayout&, const int64_t*, \
                                          const uint8_t*, const Mask*, Estimator,         \
                                          const RowLayout&, float*, int);
SKYRL_INSTANTIATE(uint8_t)
SKYRL_INSTANTIATE(int64_t)
SKYRL_INSTANTIATE(float)
#undef SKYRL_INSTANTIATE

}  // namespace skyrl_fast
