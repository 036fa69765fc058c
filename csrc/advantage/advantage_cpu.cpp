// Group-wise advantages on the CPU: one pass over the last rows' rewards, one over the output.
#include <vector>

#include "advantage/advantage.h"
#include "advantage/group_moments.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "group_advantage";

struct Trajectories {
  std::vector<int64_t> row_trajectory;  // per row
  std::vector<int64_t> last_row;        // per trajectory
  std::vector<double> score;            // per trajectory
  std::vector<int64_t> group;           // per trajectory, dense group number
  int64_t num_groups = 0;
};

Trajectories find_trajectories(int64_t num_rows, const int64_t* group_ids,
                               const uint8_t* is_last_step) {
  check_trajectories(kOp, group_ids, is_last_step, num_rows);
  Trajectories t;
  t.row_trajectory.resize(num_rows);
  DenseIds dense(num_rows / 2 + 1);
  for (int64_t row = 0; row < num_rows; ++row) {
    t.row_trajectory[row] = static_cast<int64_t>(t.last_row.size());
    if (is_last_step != nullptr && !is_last_step[row]) continue;
    t.last_row.push_back(row);
    t.group.push_back(dense(group_ids[row]));
  }
  t.num_groups = dense.size();
  return t;
}

void read_scores(const float* rewards, const RowLayout& layout, int num_threads, Trajectories* t) {
  const int64_t num = static_cast<int64_t>(t->last_row.size());
  t->score.resize(num);
  const int64_t grain = kRowCellsPerThread / layout.mean_length() + 1;
  parallel_for(num_threads, num, grain, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      t->score[j] = row_reward(kOp, rewards, layout, t->last_row[j]);
    }
  });
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
  Trajectories t = find_trajectories(n, group_ids, is_last_step);
  read_scores(rewards, rewards_layout, num_threads, &t);
  const std::vector<float> advantage = trajectory_advantages(t, estimator);
  broadcast_rows([&](int64_t row) { return advantage[t.row_trajectory[row]]; }, mask, out_layout,
                 out, num_threads);
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
