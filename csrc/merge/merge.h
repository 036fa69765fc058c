// Joining the steps of a trajectory whose context only grew: which rows become one, and where their
// cells go. Positions count from a row's first prompt token; N rows, one per step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/tensor.h"

namespace skyrl_fast {

// The number of equal elements at the beginning of `a` and `b`, n at most.
template <typename T>
int64_t common_prefix(const T* a, const T* b, int64_t n) {
  constexpr int64_t kBlock = 64;  // memcmp on blocks is as fast as memory; the rest is short
  int64_t i = 0;
  while (i + kBlock <= n && std::memcmp(a + i, b + i, kBlock * sizeof(T)) == 0) i += kBlock;
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

// Rows in order. Rows of one trajectory are adjacent.
struct MergeRows {
  int64_t num_rows = 0;
  const int64_t* prompt_lengths = nullptr;
  const int64_t* response_lengths = nullptr;
  const int32_t* trajectory_ids = nullptr;
  const uint8_t* loss_mask = nullptr;  // per response token; null: no drift is realigned

  int64_t length(int64_t row) const { return prompt_lengths[row] + response_lengths[row]; }

  // Whether the row is a later step of the previous row's trajectory.
  bool continues(int64_t row) const {
    return row > 0 && trajectory_ids[row] == trajectory_ids[row - 1];
  }

  // Whether the row's prompt can hold the tokens of the previous row, except for the last
  // max_drift.
  bool may_join(int64_t row, int64_t max_drift) const {
    return continues(row) && prompt_lengths[row] >= length(row - 1) - max_drift;
  }
};

// For each row: how many tokens of its prompt equal those of the previous row, also where it is
// too short to join it; 0 in a trajectory's first row. A merged row ends with the tokens of its
// last step, so that merging needs no other comparison, and each token is read twice: as part of a
// prompt and as part of the previous row.
template <typename Offset>
void overlaps_cpu(const int32_t* tokens, const Offset* cu_seqlens, const MergeRows& rows,
                  int64_t max_drift, int64_t* overlaps, int num_threads);

// Greedily, from the first row on:
//   joins    whether the row continues the merged row of the previous row
//   limits   the position from which later steps replaced the row's tokens (INT64_MAX: nowhere).
//            Rewards of replaced tokens belong to the token before it.
// A row joins where its prompt begins with all of the merged row; or, with a loss mask, where that
// fails in the last max_drift tokens only, and the token before is in the merged row's last stretch
// of trained tokens or after it.
void merge_plan_cpu(const MergeRows& rows, const int64_t* overlaps, int64_t max_drift,
                    uint8_t* joins, int64_t* limits);

// The captured routes, [begins, ends) of each row's `counts`, that the row contributes to its
// merged row: recorded routes stay, and a row appends those beyond them. A row without routes
// appends none. Returns the first row with fewer routes than were recorded before it, or -1.
int64_t merge_routes_cpu(const int64_t* counts, int64_t num_rows, const uint8_t* joins,
                         const int64_t* overlaps, const int64_t* limits, int64_t* begins,
                         int64_t* ends);

// Segment i: `lengths[i]` cells from source_starts[i] to target_starts[i]; segments do not overlap.
void copy_segments_cpu(const void* source, const int64_t* source_starts, void* target,
                       const int64_t* target_starts, const int64_t* lengths, int64_t num_segments,
                       int64_t cell_bytes, int num_threads);

}  // namespace skyrl_fast
