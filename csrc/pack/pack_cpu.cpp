// Ragged rows in flat or padded arrays on the CPU. Everything here is bound by memory bandwidth.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "core/parallel.h"
#include "core/streaming.h"
#include "pack/pack.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kBytesPerThread = 4 << 20;  // below this a thread costs more than it saves

float half_to_float(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? std::nanf("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

float bfloat16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

template <typename In, typename Out>
int64_t copy_ints(const ArrayRow& row, Out* __restrict__ out, Bounds bounds) {
  const In* __restrict__ in = static_cast<const In*>(row.data);
  const int64_t n = row.size;
  const uint64_t high = static_cast<uint64_t>(bounds.high);  // one more than the largest may wrap
  bool good = true;
  if (row.stride == 1 && bounds.contain(std::numeric_limits<In>::min()) &&
      bounds.contain(std::numeric_limits<In>::max())) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(in[i]);
  } else if (row.stride == 1 && bounds.low == 0 && (high & (high + 1)) == 0) {
    // From 0 to 2^k - 1: the values have no higher bit if all of them together have none.
    uint64_t bits = 0;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<Out>(in[i]);
      bits |= static_cast<uint64_t>(static_cast<int64_t>(in[i]));
    }
    good = bits <= high;
  } else if (row.stride == 1) {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<Out>(in[i]);
      good &= bounds.contain(static_cast<int64_t>(in[i]));
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<Out>(in[i * row.stride]);
      good &= bounds.contain(static_cast<int64_t>(in[i * row.stride]));
    }
  }
  if (good) return -1;
  for (int64_t i = 0; i < n; ++i) {
    if (!bounds.contain(static_cast<int64_t>(in[i * row.stride]))) return i;
  }
  return n - 1;  // another thread corrected it since; it was wrong when copied
}

template <typename Out>
int64_t copy_to(const ArrayRow& row, Out* out, Bounds bounds) {
  switch (row.dtype) {
    case DType::kBool:
    case DType::kUInt8: return copy_ints<uint8_t>(row, out, bounds);
    case DType::kInt8: return copy_ints<int8_t>(row, out, bounds);
    case DType::kInt16: return copy_ints<int16_t>(row, out, bounds);
    case DType::kInt32: return copy_ints<int32_t>(row, out, bounds);
    case DType::kInt64: return copy_ints<int64_t>(row, out, bounds);
    default: break;
  }
  if constexpr (std::is_same_v<Out, float>) {
    const int64_t n = row.size;
    switch (row.dtype) {
      case DType::kFloat32: {
        const float* in = static_cast<const float*>(row.data);
        if (row.stride == 1) {
          std::memcpy(out, in, n * sizeof(float));
        } else {
          for (int64_t i = 0; i < n; ++i) out[i] = in[i * row.stride];
        }
        return -1;
      }
      case DType::kFloat64: {
        const double* in = static_cast<const double*>(row.data);
        for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i * row.stride]);
        return -1;
      }
      case DType::kFloat16: {
        const uint16_t* in = static_cast<const uint16_t*>(row.data);
        for (int64_t i = 0; i < n; ++i) out[i] = half_to_float(in[i * row.stride]);
        return -1;
      }
      case DType::kBFloat16: {
        const uint16_t* in = static_cast<const uint16_t*>(row.data);
        for (int64_t i = 0; i < n; ++i) out[i] = bfloat16_to_float(in[i * row.stride]);
        return -1;
      }
      default: break;
    }
  }
  throw std::logic_error("copy_row_cpu: dtypes that no caller should ask for");
}

// A plain loop, kept from becoming a memset, whose string instruction was a third slower on a
// virtual machine.
template <typename T>
#if defined(__GNUC__)
__attribute__((noinline))
#endif
void fill_cached(T* out, T value, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = value;
  }
}

// To be followed by `end_streaming`.
template <typename T>
void fill_streaming(T* out, T value, int64_t n) {
  constexpr int64_t kCell = sizeof(T), kCells = kLineBytes / kCell;
  alignas(kLineBytes) T line[kCells];
  for (T& cell : line) cell = value;
  int64_t i = bytes_to_line(out, n * kCell) / kCell;
  fill_cached(out, value, i);
  for (; i + kCells <= n; i += kCells) stream_line(line, out + i);
  fill_cached(out + i, value, n - i);
}

template <typename T>
void fill_cells(T* out, T value, int64_t n, bool streaming) {
  constexpr int64_t kShortest = 1024;  // bytes; shorter runs are mostly ends
  if (streaming && n * static_cast<int64_t>(sizeof(T)) >= kShortest) {
    fill_streaming(out, value, n);
  } else {
    fill_cached(out, value, n);
  }
}

bool is_large(const PaddedLayout& layout, int64_t cell_bytes) {
  return layout.num_rows * layout.width * cell_bytes > kStreamedBytes;
}

template <typename T>
void fill_padding(T* out, T value, const PaddedLayout& layout, int64_t begin, int64_t end) {
  const bool streaming = is_large(layout, sizeof(T));
  for (int64_t row = begin; row < end; ++row) {
    fill_cells(out + layout.pad_start(row), value, layout.num_pads(row), streaming);
  }
  end_streaming();
}

// Writes `cell` n times by copying what is already written, so that memcpy copies long runs.
void repeat_cell(char* out, const void* cell, int64_t cell_bytes, int64_t n) {
  if (n == 0) return;
  constexpr int64_t kRunBytes = 1 << 14;  // stays in the first-level cache
  std::memcpy(out, cell, cell_bytes);
  int64_t done = 1;
  while (done < n) {
    const int64_t run = std::min({done, n - done, std::max<int64_t>(1, kRunBytes / cell_bytes)});
    std::memcpy(out + done * cell_bytes, out, run * cell_bytes);
    done += run;
  }
}

void fill_around_row(char* out, const BlockLayout& layout, int64_t row, int64_t cell_bytes,
                     const void* cell) {
  const int64_t begin = row * layout.width, start = layout.row_start(row);
  const int64_t end = start + layout.lengths[row];
  repeat_cell(out + begin * cell_bytes, cell, cell_bytes, start - begin);
  repeat_cell(out + end * cell_bytes, cell, cell_bytes, begin + layout.width - end);
}

int64_t rows_per_thread(int64_t total_bytes, int64_t num_rows) {
  return kBytesPerThread / (total_bytes / num_rows + 1) + 1;
}

}  // namespace

bool is_integer(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64: return true;
    default: return false;
  }
}

bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8: return 1;
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kInt32:
    case DType::kFloat32: return 4;
    case DType::kInt64:
    case DType::kFloat64: return 8;
    case DType::kOther: break;
  }
  throw std::logic_error("element_size: a dtype without a size");
}

int64_t copy_row_cpu(const ArrayRow& row, DType out_dtype, void* out, Bounds bounds) {
  if (row.size == 0) return -1;
  switch (out_dtype) {
    case DType::kUInt8: return copy_to(row, static_cast<uint8_t*>(out), bounds);
    case DType::kInt16: return copy_to(row, static_cast<int16_t*>(out), bounds);
    case DType::kInt32: return copy_to(row, static_cast<int32_t*>(out), bounds);
    case DType::kInt64: return copy_to(row, static_cast<int64_t*>(out), bounds);
    case DType::kFloat32: return copy_to(row, static_cast<float*>(out), bounds);
    default: throw std::logic_error("copy_row_cpu: an output dtype that no caller should ask for");
  }
}

void fill_padding_cpu(void* out, DType dtype, double value, const PaddedLayout& layout,
                      int64_t begin, int64_t end) {
  if (dtype == DType::kFloat32) {
    fill_padding(static_cast<float*>(out), static_cast<float>(value), layout, begin, end);
  } else {
    fill_padding(static_cast<int64_t*>(out), static_cast<int64_t>(value), layout, begin, end);
  }
}

void fill_mask_cpu(int64_t* out, const PaddedLayout& layout, int64_t begin, int64_t end) {
  const bool streaming = is_large(layout, sizeof(int64_t));
  for (int64_t row = begin; row < end; ++row) {
    fill_cells(out + layout.pad_start(row), int64_t{0}, layout.num_pads(row), streaming);
    fill_cells(out + layout.row_start(row), int64_t{1}, layout.lengths[row], streaming);
  }
  end_streaming();
}

void padded_to_flat_cpu(const void* padded, const BlockLayout& layout, const int64_t* cu,
                        int64_t cell_bytes, void* flat, int64_t* position_ids, int num_threads) {
  if (layout.num_rows == 0) return;
  const int64_t moved_bytes = cell_bytes + static_cast<int64_t>(sizeof(int64_t));
  const int64_t grain = rows_per_thread(cu[layout.num_rows] * moved_bytes, layout.num_rows);
  parallel_for(num_threads, layout.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (layout.lengths[row] == 0) continue;  // the arrays may be null
      std::iota(position_ids + cu[row], position_ids + cu[row + 1], int64_t{0});
      if (cell_bytes == 0) continue;
      std::memcpy(static_cast<char*>(flat) + cu[row] * cell_bytes,
                  static_cast<const char*>(padded) + layout.row_start(row) * cell_bytes,
                  layout.lengths[row] * cell_bytes);
    }
  });
}

void flat_to_padded_cpu(const void* flat, const BlockLayout& layout, const int64_t* cu,
                        int64_t cell_bytes, const void* pad_cell, void* padded, int num_threads) {
  if (layout.num_rows == 0 || cell_bytes == 0) return;
  const int64_t grain =
      rows_per_thread(layout.width * cell_bytes * layout.num_rows, layout.num_rows);
  parallel_for(num_threads, layout.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      fill_around_row(static_cast<char*>(padded), layout, row, cell_bytes, pad_cell);
      if (layout.lengths[row] == 0) continue;
      std::memcpy(static_cast<char*>(padded) + layout.row_start(row) * cell_bytes,
                  static_cast<const char*>(flat) + cu[row] * cell_bytes,
                  layout.lengths[row] * cell_bytes);
    }
  });
}

void fill_around_cpu(void* out, const BlockLayout& layout, int64_t cell_bytes, const void* cell,
                     int num_threads) {
  if (layout.num_rows == 0 || cell_bytes == 0) return;
  const int64_t grain =
      rows_per_thread(layout.width * cell_bytes * layout.num_rows, layout.num_rows);
  parallel_for(num_threads, layout.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      fill_around_row(static_cast<char*>(out), layout, row, cell_bytes, cell);
    }
  });
}

template <typename Mask>
int64_t mask_blocks_cpu(const Mask* mask, int64_t num_rows, int64_t width, int64_t* starts,
                        int64_t* lengths, int num_threads) {
  if (num_rows == 0) return -1;
  std::vector<uint8_t> bad(num_rows, 0);
  const int64_t grain = rows_per_thread(width * num_rows * sizeof(Mask), num_rows);
  parallel_for(num_threads, num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Mask* cells = mask + row * width;
      int64_t ones = 0, others = 0;
      for (int64_t t = 0; t < width; ++t) {
        ones += cells[t] == Mask{1};
        others += cells[t] != Mask{0} && cells[t] != Mask{1};
      }
      const Mask* block = ones == 0 ? cells : std::find(cells, cells + width, Mask{1});
      starts[row] = block - cells;
      lengths[row] = ones;
      // If the block holds all ones of the row, there are none elsewhere.
      int64_t in_block = 0;
      for (int64_t t = 0; t < std::min(ones, width - starts[row]); ++t) {
        in_block += block[t] == Mask{1};
      }
      bad[row] = others != 0 || in_block != ones;
    }
  });
  const auto first = std::find(bad.begin(), bad.end(), uint8_t{1});
  return first == bad.end() ? -1 : first - bad.begin();
}

template int64_t mask_blocks_cpu<uint8_t>(const uint8_t*, int64_t, int64_t, int64_t*, int64_t*,
                                          int);
template int64_t mask_blocks_cpu<int32_t>(const int32_t*, int64_t, int64_t, int64_t*, int64_t*,
                                          int);
template int64_t mask_blocks_cpu<int64_t>(const int64_t*, int64_t, int64_t, int64_t*, int64_t*,
                                          int);
template int64_t mask_blocks_cpu<float>(const float*, int64_t, int64_t, int64_t*, int64_t*, int);

}  // namespace skyrl_fast
