// Sequences: rows that extend each other, and runs of similar length by dynamic programming.
#include <algorithm>
#include <cstring>

#include "core/parallel.h"
#include "core/row_layout.h"
#include "merge/merge.h"
#include "passes/sequence_runs.h"

namespace skyrl_fast {
namespace {

// Of the budget: a pass costs as much as so many tokens, whatever it holds. Not measured per
// device, as the padding that it saves is a multiple of it where it matters.
constexpr double kPassShare = 1.0 / 32;

bool has_same_routes(const PassRows& rows, int64_t row, int64_t host, int64_t needed) {
  if (rows.routes == nullptr) return true;
  const int64_t count = std::min(rows.num_routes(row), needed);
  return count == std::min(rows.num_routes(host), needed) &&
         std::memcmp(rows.routes + rows.cu_routes[row] * rows.route_bytes,
                     rows.routes + rows.cu_routes[host] * rows.route_bytes,
                     count * rows.route_bytes) == 0;
}

bool begins_with(const PassRows& rows, int64_t host, int64_t row) {
  const int64_t length = rows.length(row);
  return length <= rows.length(host) &&
         common_prefix(rows.tokens + rows.cu_tokens[row], rows.tokens + rows.cu_tokens[host],
                       length) == length;
}

}  // namespace

std::vector<int64_t> sequence_hosts(const PassRows& rows, const std::vector<int64_t>& visited,
                                    const std::vector<int64_t>& kinds, const int64_t* needed,
                                    int num_threads) {
  const int64_t count = static_cast<int64_t>(visited.size());
  std::vector<uint8_t> is_extended(visited.size(), 0);
  const int64_t mean = rows.num_rows > 0 ? rows.cu_tokens[rows.num_rows] / rows.num_rows : 0;
  parallel_for(num_threads, count - 1, kRowCellsPerThread / (mean + 1) + 1,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t row = visited[i], next = visited[i + 1];
                   is_extended[i] = rows.trajectory_ids[row] == rows.trajectory_ids[next] &&
                                    kinds[row] == kinds[next] && begins_with(rows, next, row) &&
                                    has_same_routes(rows, row, next, needed[row]);
                 }
               });
  std::vector<int64_t> hosts(rows.num_rows);
  for (int64_t row = 0; row < rows.num_rows; ++row) hosts[row] = row;
  for (int64_t i = count - 2; i >= 0; --i) {
    if (is_extended[i]) hosts[visited[i]] = hosts[visited[i + 1]];
  }
  return hosts;
}

std::vector<int64_t> cheapest_runs(const std::vector<int64_t>& widths,
                                   const std::vector<int64_t>& counts,
                                   const std::vector<int64_t>& kinds, int64_t token_budget) {
  const int64_t num_units = static_cast<int64_t>(widths.size());
  std::vector<int64_t> rows(num_units + 1, 0), begins(num_units + 1, 0);
  for (int64_t i = 0; i < num_units; ++i) rows[i + 1] = rows[i] + counts[i];
  std::vector<double> cost(num_units + 1, 0.0);
  int64_t first = 0;  // of the possible beginnings
  for (int64_t stop = 1; stop <= num_units; ++stop) {
    const auto padded = [&](int64_t begin) { return (rows[stop] - rows[begin]) * widths[begin]; };
    while (first < stop - 1 && (padded(first) > token_budget || kinds[first] != kinds[stop - 1])) {
      ++first;
    }
    double least = 0.0;
    for (int64_t begin = first; begin < stop; ++begin) {
      const double total = cost[begin] + static_cast<double>(padded(begin));
      if (begin > first && total >= least) continue;
      least = total;
      begins[stop] = begin;
    }
    cost[stop] = least + kPassShare * static_cast<double>(token_budget);
  }
  std::vector<int64_t> cuts{num_units};
  while (cuts.back() > 0) cuts.push_back(begins[cuts.back()]);
  std::reverse(cuts.begin(), cuts.end());
  return cuts;
}

}  // namespace skyrl_fast
