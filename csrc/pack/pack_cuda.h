// Rows between flat and padded arrays on a CUDA device, enqueued on `stream` without synchronizing.
#pragma once

#include <cstdint>

#include "core/cuda.h"
#include "core/tensor.h"

namespace skyrl_fast {

// Rows of `lengths[i] = cu[i + 1] - cu[i]` cells between flat (sum, ...) and padded
// (num_rows, width, ...) form; a cell has `cell_bytes` bytes.
struct MoveJob {
  int64_t num_rows = 0;
  int64_t width = 0;
  int64_t cell_bytes = 0;
  const int64_t* cu = nullptr;      // num_rows + 1
  const int64_t* starts = nullptr;  // num_rows: the first column of each row's cells
};

// `position_ids`: int64 (sum), 0, 1, ... in each row.
void padded_to_flat_cuda(const MoveJob& job, const void* padded, void* flat, int64_t* position_ids,
                         cudaStream_t stream);

// Padding cells are filled with the 16 bytes of `pattern`, an integer number of elements.
void flat_to_padded_cuda(const MoveJob& job, const void* flat, const uint32_t (&pattern)[4],
                         void* padded, cudaStream_t stream);

}  // namespace skyrl_fast
