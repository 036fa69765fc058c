// Checks of rows and trajectories, and the choice of the loops over their cells.
#include "core/row_layout.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "core/simd.h"

namespace skyrl_fast {

const RowLoops& row_loops() { return SKYRL_OF_SIMD_LEVEL(row_loops); }

void check_trajectories(const char* op, const int64_t* group_ids, const uint8_t* is_last_step,
                        int64_t num_rows) {
  if (is_last_step == nullptr || num_rows == 0) return;
  if (!is_last_step[num_rows - 1]) {
    throw std::invalid_argument(std::string(op) +
                                ": is_last_step: expected True in the last row, got False");
  }
  for (int64_t row = 0; group_ids != nullptr && row + 1 < num_rows; ++row) {
    if (!is_last_step[row] && group_ids[row + 1] != group_ids[row]) {
      throw std::invalid_argument(std::string(op) +
                                  ": group_ids: expected one id within a trajectory, but row " +
                                  std::to_string(row) + " (not a last step) and row " +
                                  std::to_string(row + 1) + " differ");
    }
  }
}

void refuse_rewards(const char* op, int64_t row, double sum) {
  throw std::invalid_argument(std::string(op) +
                              ": rewards: expected finite numbers, but those of row " +
                              std::to_string(row) + " sum to " + std::to_string(sum));
}

double row_reward(const char* op, const float* rewards, const RowLayout& layout, int64_t row) {
  const double sum = row_loops().sum(rewards + layout.offset(row), layout.length(row));
  if (!std::isfinite(sum)) refuse_rewards(op, row, sum);
  return sum;
}

}  // namespace skyrl_fast
