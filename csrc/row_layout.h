// Rows (steps) of cells, the trajectories they make up, and one value per row spread over its
// cells.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "parallel.h"

namespace skyrl_fast {

// Where each row's cells lie: row i owns [offset(i), offset(i) + length(i)).
struct RowLayout {
  int64_t num_rows = 0;
  int64_t width = 0;            // padded: cells per row
  const int32_t* cu = nullptr;  // ragged: num_rows + 1 offsets; null when padded
  int64_t offset(int64_t row) const { return cu ? cu[row] : row * width; }
  int64_t length(int64_t row) const { return cu ? cu[row + 1] - cu[row] : width; }
  int64_t mean_length() const {
    return num_rows == 0 ? 1 : std::max<int64_t>(1, offset(num_rows) / num_rows);
  }
};

constexpr int64_t kRowCellsPerThread = 1 << 19;  // below this a thread costs more than it saves

// Numbers ids by first appearance. Rows of a group usually follow each other: no look-up for those.
class DenseIds {
 public:
  explicit DenseIds(int64_t expected) { seen_.reserve(expected); }
  int64_t operator()(int64_t id) {
    if (last_dense_ < 0 || id != last_id_) {
      last_id_ = id;
      last_dense_ = seen_.try_emplace(id, static_cast<int64_t>(seen_.size())).first->second;
    }
    return last_dense_;
  }
  int64_t size() const { return static_cast<int64_t>(seen_.size()); }

 private:
  std::unordered_map<int64_t, int64_t> seen_;
  int64_t last_id_ = 0, last_dense_ = -1;
};

// Refuses a last row that is no last step, and a trajectory in two groups. `group_ids` may be null;
// a null `is_last_step` makes every row a trajectory.
inline void check_trajectories(const char* op, const int64_t* group_ids,
                               const uint8_t* is_last_step, int64_t num_rows) {
  if (is_last_step == nullptr || num_rows == 0) return;
  if (!is_last_step[num_rows - 1]) {
    throw std::invalid_argument(std::string(op) +
                                ": is_last_step must be True in the last row, got False");
  }
  for (int64_t row = 0; group_ids != nullptr && row + 1 < num_rows; ++row) {
    if (!is_last_step[row] && group_ids[row + 1] != group_ids[row]) {
      throw std::invalid_argument(std::string(op) +
                                  ": group_ids must be equal within a trajectory, but row " +
                                  std::to_string(row) + " (not a last step) and row " +
                                  std::to_string(row + 1) + " differ");
    }
  }
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
inline double cell_sum(const float* cells, int64_t length) {
  constexpr int kLanes = 4;
  Doubles a{}, b{}, c{}, d{};
  int64_t t = 0;
  for (; t + 4 * kLanes <= length; t += 4 * kLanes) {
    add_doubles(cells + t, &a);
    add_doubles(cells + t + kLanes, &b);
    add_doubles(cells + t + 2 * kLanes, &c);
    add_doubles(cells + t + 3 * kLanes, &d);
  }
  a = (a + b) + (c + d);
  double sum = (a[0] + a[1]) + (a[2] + a[3]);
  for (; t < length; ++t) sum += cells[t];
  return sum;
}

[[noreturn]] inline void refuse_rewards(const char* op, int64_t row, double sum) {
  throw std::invalid_argument(std::string(op) + ": rewards must be finite, but those of row " +
                              std::to_string(row) + " sum to " + std::to_string(sum));
}

// The sum of a row's rewards; refuses one that is not finite.
inline double row_reward(const char* op, const float* rewards, const RowLayout& layout,
                         int64_t row) {
  const double sum = cell_sum(rewards + layout.offset(row), layout.length(row));
  if (!std::isfinite(sum)) refuse_rewards(op, row, sum);
  return sum;
}

// Masks are 0/1 (or small weights): 32 bits hold them, and convert in vectors where 64 do not.
inline float mask_value(int64_t m) { return static_cast<float>(static_cast<int32_t>(m)); }
inline float mask_value(uint8_t m) { return static_cast<float>(m); }
inline float mask_value(float m) { return m; }

template <typename Mask>
void broadcast_row(float value, const Mask* __restrict__ mask, int64_t length,
                   float* __restrict__ out) {
  if (mask == nullptr) {
    for (int64_t t = 0; t < length; ++t) out[t] = value;
  } else {
    for (int64_t t = 0; t < length; ++t) out[t] = value * mask_value(mask[t]);
  }
}

// out[i, :] = value_of_row(i) * mask[i, :]; a null mask is all ones.
template <typename Mask, typename ValueOfRow>
void broadcast_rows(const ValueOfRow& value_of_row, const Mask* mask, const RowLayout& layout,
                    float* out, int num_threads) {
  const int64_t grain = kRowCellsPerThread / layout.mean_length() + 1;
  parallel_for(num_threads, layout.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t offset = layout.offset(row);
      broadcast_row(value_of_row(row), mask ? mask + offset : nullptr, layout.length(row),
                    out + offset);
    }
  });
}

}  // namespace skyrl_fast
