// Ragged rows in flat or padded arrays: copying rows in, filling the padding, and moving rows
// between the two. Rows may come from Python lists too: bindings/python_lists.h.
#pragma once

#include <cstdint>
#include <limits>

#include "core/tensor.h"

namespace skyrl_fast {

// Rows of `lengths` cells at the right edge of an array of num_rows x width cells.
struct PaddedLayout {
  int64_t num_rows = 0;
  int64_t width = 0;
  const int64_t* lengths = nullptr;

  int64_t num_pads(int64_t row) const { return width - lengths[row]; }
  int64_t row_start(int64_t row) const { return row * width + num_pads(row); }
  int64_t pad_start(int64_t row) const { return row * width; }
};

// Rows of `lengths` cells from column `starts` on, in an array of num_rows x width cells.
struct BlockLayout {
  int64_t num_rows = 0;
  int64_t width = 0;
  const int64_t* starts = nullptr;
  const int64_t* lengths = nullptr;

  int64_t row_start(int64_t row) const { return row * width + starts[row]; }
};

// The integers that a field accepts, both ends included.
struct Bounds {
  int64_t low = std::numeric_limits<int64_t>::min();
  int64_t high = std::numeric_limits<int64_t>::max();

  bool contain(int64_t value) const {
    return static_cast<uint64_t>(value) - static_cast<uint64_t>(low) <=
           static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  }
};

// One row of an array: `size` elements, `stride` elements apart.
struct ArrayRow {
  const void* data = nullptr;
  int64_t size = 0;
  int64_t stride = 1;
  DType dtype = DType::kOther;
};

bool is_integer(DType dtype);   // bool included
bool is_floating(DType dtype);  // float16 and bfloat16 included
int64_t element_size(DType dtype);

// Copies a row with conversion: integers to uint8, int16, int32, int64 or float32, floats to
// float32.
// Returns the position of the first integer out of bounds, or -1. Throws logic_error for a pair of
// dtypes that the caller should have refused.
int64_t copy_row_cpu(const ArrayRow& row, DType out_dtype, void* out, Bounds bounds);

// Writes `value` to the padding cells of rows [begin, end); float32, or int64 of a 32-bit value.
void fill_padding_cpu(void* out, DType dtype, double value, const PaddedLayout& layout,
                      int64_t begin, int64_t end);

// Writes 1 to the cells of rows [begin, end) and 0 to their padding.
void fill_mask_cpu(int64_t* out, const PaddedLayout& layout, int64_t begin, int64_t end);

// Padded to flat: flat[cu[i]:cu[i+1]] = the block of row i, in cells of cell_bytes; and the
// position of every flat cell in its row.
void padded_to_flat_cpu(const void* padded, const BlockLayout& layout, const int64_t* cu,
                        int64_t cell_bytes, void* flat, int64_t* position_ids, int num_threads);

// Flat to padded; the padding cells receive the cell_bytes at `pad_cell`.
void flat_to_padded_cpu(const void* flat, const BlockLayout& layout, const int64_t* cu,
                        int64_t cell_bytes, const void* pad_cell, void* padded, int num_threads);

// Writes the cell_bytes at `cell` to the cells of each row outside its block.
void fill_around_cpu(void* out, const BlockLayout& layout, int64_t cell_bytes, const void* cell,
                     int num_threads);

// Finds the block of ones of each row of a 0/1 mask; an empty one starts at 0. Returns the first
// row with anything but zeros and one block of ones, or -1. Mask of uint8, int32, int64 or float.
template <typename Mask>
int64_t mask_blocks_cpu(const Mask* mask, int64_t num_rows, int64_t width, int64_t* starts,
                        int64_t* lengths, int num_threads);

}  // namespace skyrl_fast
