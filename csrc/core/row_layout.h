// Rows (steps) of cells, their trajectories, and broadcasting one value per row over its cells.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>

#include "core/parallel.h"
#include "core/row_loops.h"
#include "core/streaming.h"

namespace skyrl_fast {

// Where each row's cells are: row i is [offset(i), offset(i) + length(i)).
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

constexpr int64_t kRowCellsPerThread = 1 << 17;  // below this a thread costs more than it saves

// Numbers ids by first appearance. Rows of a group are usually adjacent and need no look-up.
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
void check_trajectories(const char* op, const int64_t* group_ids, const uint8_t* is_last_step,
                        int64_t num_rows);

[[noreturn]] void refuse_rewards(const char* op, int64_t row, double sum);

// The sum of a row's rewards; refuses one that is not finite.
double row_reward(const char* op, const float* rewards, const RowLayout& layout, int64_t row);

// out[i, :] = row_value(i) * mask[i, :]; a null mask is all ones.
template <typename Mask, typename RowValue>
void broadcast_rows(const RowValue& row_value, const Mask* mask, const RowLayout& layout,
                    float* out, int num_threads) {
  const RowLoops& loops = row_loops();
  const auto times = loops.times(mask);
  const int64_t num_bytes =
      layout.num_rows > 0 ? layout.offset(layout.num_rows) * static_cast<int64_t>(sizeof(float))
                          : 0;
  const bool stream = num_bytes > kStreamedBytes;
  const int64_t grain = kRowCellsPerThread / layout.mean_length() + 1;
  parallel_for(num_threads, layout.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t offset = layout.offset(row);
      if (mask == nullptr) {
        loops.fill(row_value(row), layout.length(row), stream, out + offset);
      } else {
        times(row_value(row), mask + offset, layout.length(row), stream, out + offset);
      }
    }
    if (stream) end_streaming();
  });
}

}  // namespace skyrl_fast
