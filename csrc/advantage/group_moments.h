// Count, mean and unbiased deviation of the values of each group.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace skyrl_fast {

struct GroupMoments {
  std::vector<int64_t> count;
  std::vector<double> mean, std;  // std is 1 in a group of one
};

// Two passes in the order of the values: squared deviations are taken from the mean itself, so that
// groups whose values are nearly equal keep their variance.
inline GroupMoments group_moments(const std::vector<double>& values,
                                  const std::vector<int64_t>& group, int64_t num_groups) {
  const int64_t num = static_cast<int64_t>(values.size());
  GroupMoments m{std::vector<int64_t>(num_groups), std::vector<double>(num_groups),
                 std::vector<double>(num_groups)};
  for (int64_t j = 0; j < num; ++j) {
    ++m.count[group[j]];
    m.mean[group[j]] += values[j];
  }
  for (int64_t g = 0; g < num_groups; ++g) m.mean[g] /= static_cast<double>(m.count[g]);
  for (int64_t j = 0; j < num; ++j) {
    const double deviation = values[j] - m.mean[group[j]];
    m.std[group[j]] += deviation * deviation;
  }
  for (int64_t g = 0; g < num_groups; ++g) {
    m.std[g] = m.count[g] > 1 ? std::sqrt(m.std[g] / static_cast<double>(m.count[g] - 1)) : 1.0;
  }
  return m;
}

}  // namespace skyrl_fast
