// Ragged rows on a CUDA device: several fields from flat arrays to padded ones in one launch, and
// rows between the two layouts. All enqueue on `stream` without synchronizing.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/tensor.h"

namespace skyrl_fast {

// The content of the cells of an expanded field.
enum class FieldKind : int {
  kValues = 0,  // the row's elements
  kMask = 1,    // 1 in the row's cells, 0 in the padding
  kJoined = 2,  // the row's elements of `source`, then those of `second`
  kLast = 3,    // one element per row, in the row's last cell; 0 elsewhere
};

constexpr int kMaxFields = 8;

// Row i of a field has lengths offsets[i + 1] - offsets[i] (likewise for the second part).
// Padding is on the left: rows end at the right edge.
struct ExpandField {
  FieldKind kind = FieldKind::kValues;
  const void* source = nullptr;  // int32 or float, flat
  const void* second = nullptr;
  const int64_t* offsets = nullptr;         // num_rows + 1
  const int64_t* second_offsets = nullptr;  // kJoined, and masks of joined rows
  void* out = nullptr;                      // int64 (from int32) or float [num_rows, width]
  int64_t width = 0;
  bool is_float = false;
  double pad_value = 0.0;
};

struct ExpandJob {
  int64_t num_rows = 0;
  int num_fields = 0;
  ExpandField fields[kMaxFields];
};

void expand_rows_cuda(const ExpandJob& job, cudaStream_t stream);

// Rows of `lengths[i] = cu[i + 1] - cu[i]` cells between flat (sum, ...) and padded
// (num_rows, width, ...) form; a cell has `cell_bytes` bytes.
struct MoveJob {
  int64_t num_rows = 0;
  int64_t width = 0;
  int64_t cell_bytes = 0;
  const int64_t* cu = nullptr;      // num_rows + 1
  const int64_t* starts = nullptr;  // num_rows: the first column of each row's cells
};

// `position_ids`: int64 (sum), 0, 1, ... in each row, or null.
void padded_to_flat_cuda(const MoveJob& job, const void* padded, void* flat, int64_t* position_ids,
                         cudaStream_t stream);

// Padding cells are filled with the 16 bytes of `pattern`, an integer number of elements.
void flat_to_padded_cuda(const MoveJob& job, const void* flat, const uint32_t (&pattern)[4],
                         void* padded, cudaStream_t stream);

}  // namespace skyrl_fast
