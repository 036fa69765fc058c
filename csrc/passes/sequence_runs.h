// Rows laid out as sequences: which rows share one, and which sequences share a pass.
#pragma once

#include <cstdint>
#include <vector>

#include "passes/pass_plan.h"

namespace skyrl_fast {

// (N,) for each row of `visited` the later one of its trajectory that begins with it, if there is
// one: else itself.
//   visited  rows, ascending
//   kinds    (N,) a row shares no sequence with one of another kind
//   needed   (N,) tokens of each row whose routes must be those of the other
std::vector<int64_t> sequence_hosts(const PassRows& rows, const std::vector<int64_t>& visited,
                                    const std::vector<int64_t>& kinds, const int64_t* needed,
                                    int num_threads);

// Where to cut n units of rows, by descending width, so that padding and passes cost least
// together: 0, ascending borders, n. A pass costs the tokens that it pads its rows to, and as much
// as a share of the budget.
//   widths  (n,) longest row of each unit
//   counts  (n,) rows of each unit
//   kinds   (n,) units of different kinds share no pass
std::vector<int64_t> cheapest_runs(const std::vector<int64_t>& widths,
                                   const std::vector<int64_t>& counts,
                                   const std::vector<int64_t>& kinds, int64_t token_budget);

}  // namespace skyrl_fast
