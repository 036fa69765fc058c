// Kept sets: the ids of a row's logits that truncated sampling kept, over which it is normalised.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace skyrl_fast {

// The kept ids of one row, strictly ascending.
struct KeptIds {
  const int32_t* ids = nullptr;  // null: the full vocabulary
  int64_t size = 0;
  SKYRL_HD bool is_full() const { return ids == nullptr; }

  // Place of the first id that is not below `id`.
  SKYRL_HD int64_t lower_bound(int64_t id) const {
    int64_t low = 0, high = size;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ids[middle] < id) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  // Place of `id`, or -1.
  SKYRL_HD int64_t find(int64_t id) const {
    const int64_t place = lower_bound(id);
    return place < size && ids[place] == id ? place : -1;
  }
};

// Those of all rows.
struct KeptSets {
  const int32_t* ids = nullptr;  // [num_ids]; null: every row has the full vocabulary
  // [num_rows, 2], where a row's ids begin and end; begin < 0: the full vocabulary. A range without
  // ids is a slice of the vocabulary that holds none of the row's ids.
  const int64_t* ranges = nullptr;
  int64_t num_ids = 0;

  // A range outside the ids counts as one without ids.
  SKYRL_HD KeptIds of_row(int64_t row) const {
    KeptIds kept;
    if (ids == nullptr || ranges[2 * row] < 0) return kept;
    const int64_t begin = ranges[2 * row], end = ranges[2 * row + 1];
    const bool inside = begin <= end && end <= num_ids;
    kept.ids = ids + (inside ? begin : 0);
    kept.size = inside ? end - begin : 0;
    return kept;
  }
};

}  // namespace skyrl_fast
