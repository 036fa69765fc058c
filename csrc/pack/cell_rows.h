// Rows of cells in one pass each: counts, sums, quotients, products, copies. N rows, R cells.
#pragma once

#include <cstdint>

#include "core/row_layout.h"

namespace skyrl_fast {

// Of row row_ids[i] of cells (N, R) (row_ids null: of row i): nonzeros[i], how many cells are not
// 0, and lasts[i], the last of them, or 0. Returns how many cells are neither 0 nor 1.
int64_t count_nonzeros_cpu(const float* cells, int64_t width, const int64_t* row_ids,
                           int64_t num_rows, int64_t* nonzeros, float* lasts, int num_threads);

// sums[i] = the sum of row i's cells.
void sum_rows_cpu(const float* cells, const RowLayout& rows, double* sums, int num_threads);

// out = cells / divisors[row], or / divisors[0] for all rows where `one_divisor`.
void divide_rows_cpu(const float* cells, int64_t num_rows, int64_t width, const float* divisors,
                     bool one_divisor, float* out, int num_threads);

// out = values[row] * mask, and the number of cells of each row whose mask is not 0.
void multiply_rows_cpu(const float* values, const int64_t* mask, int64_t num_rows, int64_t width,
                       float* out, int64_t* counts, int num_threads);

// out = cells: bytes, no overlap. Outputs larger than the caches are written past them.
void copy_cells_cpu(const void* cells, int64_t num_bytes, void* out, int num_threads);

}  // namespace skyrl_fast
