// Group-wise advantages on the CPU: one pass over the last rows, one over the output.
#include <vector>

#include "advantage.h"
#include "group_moments.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "group_advantage";

struct Trajectories {
  std::vector<int64_t> of_row;  // row -> trajectory
  std::vector<double> score;    // per trajectory
  std::vector<int64_t> group;   // per trajectory, dense group number
  int64_t num_groups = 0;
};

Trajectories read_trajectories(const float* rewards, const RowLayout& layout,
                               const int64_t* group_ids, const uint8_t* is_last_step) {
  const int64_t n = layout.num_rows;
  check_trajectories(kOp, group_ids, is_last_step, n);
  Trajectories t;
  t.of_row.resize(n);
  t.score.reserve(n);
  t.group.reserve(n);
  DenseIds dense(n / 2 + 1);
  for (int64_t row = 0; row < n; ++row) {
    t.of_row[row] = static_cast<int64_t>(t.score.size());
    if (is_last_step != nullptr && !is_last_step[row]) continue;
    t.score.push_back(row_reward(kOp, rewards, layout, row));
    t.group.push_back(dense(group_ids[row]));
  }
  t.num_groups = dense.size();
  return t;
}

std::vector<float> trajectory_advantages(const Trajectories& t, Estimator estimator) {
  const GroupMoments m = group_moments(t.score, t.group, t.num_groups);
  std::vector<float> advantage(t.score.size());
  for (size_t j = 0; j < advantage.size(); ++j) {
    const int64_t g = t.group[j];
    advantage[j] =
        static_cast<float>(advantage_of(estimator, t.score[j], m.mean[g], m.std[g], m.count[g]));
  }
  return advantage;
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
  broadcast_rows([&](int64_t row) { return advantage[t.of_row[row]]; }, mask, out_layout, out,
                 num_threads);
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
