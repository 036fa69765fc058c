// Turn-level advantages on the CPU: one pass over the rewards, the rest over rows.
#include <cmath>
#include <vector>

#include "advantage/advantage.h"
#include "advantage/group_moments.h"
#include "advantage/turn_advantage.h"

namespace skyrl_fast {
namespace {

bool ends(const Turns& turns, int64_t row) {
  return turns.is_last_step == nullptr || turns.is_last_step[row];
}

std::vector<double> row_rewards(const Turns& turns, int num_threads) {
  check_trajectories(turns.op, turns.group_ids, turns.is_last_step, turns.layout.num_rows);
  std::vector<double> reward(turns.layout.num_rows);
  const int64_t grain = kRowCellsPerThread / turns.layout.mean_length() + 1;
  parallel_for(num_threads, turns.layout.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      reward[row] = row_reward(turns.op, turns.rewards, turns.layout, row);
    }
  });
  return reward;
}

std::vector<double> returns_to_go(const Turns& turns, const std::vector<double>& reward) {
  std::vector<double> value(reward.size());
  double following = 0.0;
  for (int64_t row = turns.layout.num_rows - 1; row >= 0; --row) {
    if (ends(turns, row)) following = 0.0;
    value[row] = following = reward[row] + turns.gamma * following;
  }
  return value;
}

// The trajectory and turn of each row, and the group of each trajectory.
struct TurnIndex {
  std::vector<int64_t> trajectory, turn;  // per row
  std::vector<int64_t> group;             // per trajectory
  std::vector<int64_t> group_size;        // per group
};

TurnIndex turn_index(const Turns& turns) {
  const int64_t n = turns.layout.num_rows;
  TurnIndex index;
  index.trajectory.resize(n);
  index.turn.resize(n);
  DenseIds dense(n / 2 + 1);
  for (int64_t row = 0, turn = 0; row < n; ++row) {
    index.trajectory[row] = static_cast<int64_t>(index.group.size());
    index.turn[row] = turn++;
    if (!ends(turns, row)) continue;
    index.group.push_back(dense(turns.group_ids[row]));
    turn = 0;
  }
  index.group_size.resize(dense.size());
  for (const int64_t g : index.group) ++index.group_size[g];
  return index;
}

// For each group the sum, over its trajectories, of the returns at each turn: a ragged table.
struct TurnSums {
  std::vector<int64_t> start;  // per group, into sum
  std::vector<double> sum;
};

TurnSums turn_sums(const TurnIndex& index, const std::vector<double>& value) {
  const int64_t n = static_cast<int64_t>(value.size());
  std::vector<int64_t> num_turns(index.group_size.size());
  for (int64_t row = 0; row < n; ++row) {
    int64_t& most = num_turns[index.group[index.trajectory[row]]];
    most = std::max(most, index.turn[row] + 1);
  }
  TurnSums sums;
  int64_t total = 0;
  for (const int64_t turns : num_turns) {
    sums.start.push_back(total);
    total += turns;
  }
  sums.sum.resize(total);
  for (int64_t row = 0; row < n; ++row) {
    sums.sum[sums.start[index.group[index.trajectory[row]]] + index.turn[row]] += value[row];
  }
  return sums;
}

// Divides by the root mean square of the group's values: one scale for all its turns.
void scale_groups(const TurnIndex& index, std::vector<double>* value) {
  std::vector<double> square(index.group_size.size());
  std::vector<int64_t> count(index.group_size.size());
  for (size_t row = 0; row < value->size(); ++row) {
    const int64_t g = index.group[index.trajectory[row]];
    square[g] += (*value)[row] * (*value)[row];
    ++count[g];
  }
  for (size_t row = 0; row < value->size(); ++row) {
    const int64_t g = index.group[index.trajectory[row]];
    (*value)[row] /= std::sqrt(square[g] / static_cast<double>(count[g])) + kAdvantageEpsilon;
  }
}

void store(const std::vector<double>& value, float* out) {
  for (size_t row = 0; row < value.size(); ++row) out[row] = static_cast<float>(value[row]);
}

}  // namespace

void turn_level_returns_cpu(const Turns& turns, float* row_values, int num_threads) {
  store(returns_to_go(turns, row_rewards(turns, num_threads)), row_values);
}

void turn_group_advantage_cpu(const Turns& turns, TurnBaseline baseline, bool scale_by_std,
                              float* row_values, int num_threads) {
  std::vector<double> value = returns_to_go(turns, row_rewards(turns, num_threads));
  const TurnIndex index = turn_index(turns);
  const TurnSums sums = turn_sums(index, value);
  double first = 0.0;  // the trajectory's return from its start
  for (size_t row = 0; row < value.size(); ++row) {
    const int64_t g = index.group[index.trajectory[row]];
    if (index.turn[row] == 0) first = value[row];
    const bool from_start = baseline == TurnBaseline::kEpisode;
    const double self = from_start ? first : value[row];
    const double all = sums.sum[sums.start[g] + (from_start ? 0 : index.turn[row])];
    const double others = static_cast<double>(index.group_size[g] - 1);
    value[row] = others > 0 ? value[row] - (all - self) / others : 0.0;
  }
  if (scale_by_std) scale_groups(index, &value);
  store(value, row_values);
}

void gigpo_advantage_cpu(const Turns& turns, const int64_t* anchor_ids, double step_weight,
                         bool scale_by_std, float* row_values, int num_threads) {
  const int64_t n = turns.layout.num_rows;
  const std::vector<double> reward = row_rewards(turns, num_threads);
  const std::vector<double> value = returns_to_go(turns, reward);
  const TurnIndex index = turn_index(turns);
  const int64_t num_groups = static_cast<int64_t>(index.group_size.size());

  std::vector<double> score(index.group.size());
  for (int64_t row = 0; row < n; ++row) score[index.trajectory[row]] += reward[row];
  const GroupMoments episodes = group_moments(score, index.group, num_groups);

  // The anchor group of a row: its (group, anchor) pair.
  DenseIds dense_anchor(n), dense_pair(n);
  std::vector<int64_t> anchor(n), pair(n);
  for (int64_t row = 0; row < n; ++row) anchor[row] = dense_anchor(anchor_ids[row]);
  for (int64_t row = 0; row < n; ++row) {
    pair[row] = dense_pair(index.group[index.trajectory[row]] * dense_anchor.size() + anchor[row]);
  }
  const GroupMoments steps = group_moments(value, pair, dense_pair.size());

  const Estimator episode = scale_by_std ? Estimator::kGrpo : Estimator::kDrGrpo;
  for (int64_t row = 0; row < n; ++row) {
    const int64_t j = index.trajectory[row], g = index.group[j], p = pair[row];
    const double outcome =
        advantage_of(episode, score[j], episodes.mean[g], episodes.std[g], episodes.count[g]);
    double step = value[row] - steps.mean[p];
    if (scale_by_std) step /= steps.std[p] + kAdvantageEpsilon;
    if (steps.count[p] == 1) step = 0.0;  // nothing to compare with
    row_values[row] = static_cast<float>(outcome + step_weight * step);
  }
}

}  // namespace skyrl_fast
