// Rows of cells in one pass each. Bound by memory bandwidth.
#include <atomic>
#include <cstring>

#include "core/parallel.h"
#include "core/streaming.h"
#include "pack/cell_rows.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kCellsPerThread = 1 << 17;  // some 100 us of work

int64_t rows_per_thread(int64_t width) { return kCellsPerThread / (width + 1) + 1; }

// Past the caches, so that no line of `out` is read before it is written.
void copy_streaming(const char* in, int64_t num_bytes, char* out) {
  int64_t at = bytes_to_line(out, num_bytes);
  std::memcpy(out, in, at);
  for (; at + kLineBytes <= num_bytes; at += kLineBytes) stream_line(in + at, out + at);
  end_streaming();
  std::memcpy(out + at, in + at, num_bytes - at);
}

}  // namespace

int64_t count_nonzeros_cpu(const float* cells, int64_t width, const int64_t* row_ids,
                           int64_t num_rows, int64_t* nonzeros, float* lasts, int num_threads) {
  std::atomic<int64_t> others{0};
  parallel_for(num_threads, num_rows, rows_per_thread(width), [&](int64_t begin, int64_t end) {
    int64_t found = 0;
    for (int64_t i = begin; i < end; ++i) {
      const float* row = cells + (row_ids == nullptr ? i : row_ids[i]) * width;
      int32_t count = 0, other = 0;  // 32 bits like the cells: vectors of the same number of lanes
      for (int64_t at = 0; at < width; ++at) {
        count += row[at] != 0.0f;
        other += (row[at] != 0.0f) & (row[at] != 1.0f);
      }
      nonzeros[i] = count;
      found += other;
      int64_t last = width - 1;
      while (count > 0 && row[last] == 0.0f) --last;
      lasts[i] = count > 0 ? row[last] : 0.0f;
    }
    others += found;
  });
  return others;
}

void sum_rows_cpu(const float* cells, const RowLayout& rows, double* sums, int num_threads) {
  const auto sum = row_loops().sum;
  const int64_t grain = rows_per_thread(rows.mean_length());
  parallel_for(num_threads, rows.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sums[i] = sum(cells + rows.offset(i), rows.length(i));
  });
}

void divide_rows_cpu(const float* cells, int64_t num_rows, int64_t width, const float* divisors,
                     bool one_divisor, float* out, int num_threads) {
  parallel_for(num_threads, num_rows, rows_per_thread(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float divisor = divisors[one_divisor ? 0 : row];
      const float* __restrict__ in = cells + row * width;
      float* __restrict__ to = out + row * width;
      for (int64_t i = 0; i < width; ++i) to[i] = in[i] / divisor;
    }
  });
}

void multiply_rows_cpu(const float* values, const int64_t* mask, int64_t num_rows, int64_t width,
                       float* out, int64_t* counts, int num_threads) {
  parallel_for(num_threads, num_rows, rows_per_thread(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t* __restrict__ in = mask + row * width;
      float* __restrict__ to = out + row * width;
      const float value = values[row];
      int64_t count = 0;
      for (int64_t i = 0; i < width; ++i) {
        to[i] = value * static_cast<float>(in[i]);
        count += in[i] != 0;
      }
      counts[row] = count;
    }
  });
}

void copy_cells_cpu(const void* cells, int64_t num_bytes, void* out, int num_threads) {
  constexpr int64_t kBytesPerThread = 1 << 20;
  parallel_for(num_threads, num_bytes, kBytesPerThread, [&](int64_t begin, int64_t end) {
    const char* in = static_cast<const char*>(cells) + begin;
    char* to = static_cast<char*>(out) + begin;
    if (num_bytes > kStreamedBytes) {
      copy_streaming(in, end - begin, to);
    } else {
      std::memcpy(to, in, end - begin);
    }
  });
}

}  // namespace skyrl_fast
