// Merging steps on the CPU: comparing is bound by memory bandwidth, deciding is O(rows).
#include <limits>

#include "core/parallel.h"
#include "merge/merge.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kBytesPerThread = 4 << 20;  // below this a thread costs more than it saves
constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();

int64_t rows_per_thread(int64_t total_bytes, int64_t num_rows) {
  return kBytesPerThread / (total_bytes / std::max<int64_t>(1, num_rows) + 1) + 1;
}

// The merged row so far: its length and its last stretch of trained tokens, [begin, end).
struct Run {
  int64_t length = 0;
  int64_t begin = -1, end = -1;

  bool can_join(int64_t overlap, int64_t max_drift) const {
    if (overlap == length) return true;
    return begin >= 0 && length - overlap <= max_drift && overlap > begin;
  }

  // A prompt that equals the row up to `overlap`, then a response.
  void add(int64_t overlap, int64_t prompt, int64_t response, const uint8_t* mask) {
    length = prompt + response;
    if (mask == nullptr) return;
    end = std::min(end, overlap);
    int64_t last = response;
    while (last > 0 && mask[last - 1] == 0) --last;
    if (last == 0) return;
    int64_t first = last;
    while (first > 0 && mask[first - 1] != 0) --first;
    const bool continues = first == 0 && begin >= 0 && end == prompt;
    if (!continues) begin = prompt + first;
    end = prompt + last;
  }
};

}  // namespace

template <typename Offset>
void overlaps_cpu(const int32_t* tokens, const Offset* cu_seqlens, const MergeRows& rows,
                  int64_t max_drift, int64_t* overlaps, int num_threads) {
  const int64_t num_rows = rows.num_rows;
  if (num_rows == 0) return;
  const int64_t total_bytes = cu_seqlens[num_rows] * static_cast<int64_t>(sizeof(int32_t));
  const int64_t grain = rows_per_thread(total_bytes, num_rows);
  parallel_for(num_threads, num_rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      overlaps[row] = 0;
      if (!rows.continues(row)) continue;
      const int64_t n = std::min(rows.length(row - 1), rows.prompt_lengths[row]);
      overlaps[row] = common_prefix(tokens + cu_seqlens[row - 1], tokens + cu_seqlens[row], n);
    }
  });
}

template void overlaps_cpu<int32_t>(const int32_t*, const int32_t*, const MergeRows&, int64_t,
                                    int64_t*, int);
template void overlaps_cpu<int64_t>(const int32_t*, const int64_t*, const MergeRows&, int64_t,
                                    int64_t*, int);

void merge_plan_cpu(const MergeRows& rows, const int64_t* overlaps, int64_t max_drift,
                    uint8_t* joins, int64_t* limits) {
  Run run;
  const uint8_t* mask = rows.loss_mask;
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    joins[row] = rows.may_join(row, max_drift) && run.can_join(overlaps[row], max_drift);
    if (!joins[row]) run = Run{};
    run.add(overlaps[row], rows.prompt_lengths[row], rows.response_lengths[row], mask);
    if (mask != nullptr) mask += rows.response_lengths[row];
  }
  int64_t limit = kNowhere;
  for (int64_t row = rows.num_rows - 1; row >= 0; --row) {
    limits[row] = limit;
    const bool drifted = joins[row] && overlaps[row] < rows.length(row - 1);
    if (!joins[row]) {
      limit = kNowhere;
    } else if (drifted) {
      limit = std::min(limit, overlaps[row]);
    }
  }
}

int64_t merge_routes_cpu(const int64_t* counts, int64_t num_rows, const uint8_t* joins,
                         const int64_t* overlaps, const int64_t* limits, int64_t* begins,
                         int64_t* ends) {
  int64_t recorded = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    recorded = joins[row] ? std::min(recorded, overlaps[row]) : 0;
    if (counts[row] > 0 && counts[row] < recorded) return row;
    begins[row] = std::min(recorded, counts[row]);
    recorded = std::max(recorded, counts[row]);
    ends[row] = std::max(begins[row], std::min(counts[row], limits[row]));
  }
  return -1;
}

void copy_segments_cpu(const void* source, const int64_t* source_starts, void* target,
                       const int64_t* target_starts, const int64_t* lengths, int64_t num_segments,
                       int64_t cell_bytes, int num_threads) {
  if (num_segments == 0) return;
  int64_t total = 0;
  for (int64_t i = 0; i < num_segments; ++i) total += lengths[i];
  const int64_t grain = rows_per_thread(total * cell_bytes, num_segments);
  parallel_for(num_threads, num_segments, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      if (lengths[i] == 0) continue;  // the arrays may be null
      std::memcpy(static_cast<char*>(target) + target_starts[i] * cell_bytes,
                  static_cast<const char*>(source) + source_starts[i] * cell_bytes,
                  lengths[i] * cell_bytes);
    }
  });
}

}  // namespace skyrl_fast
