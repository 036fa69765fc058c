// Items in the fewest parts within a budget, balanced.
#pragma once

#include <cstdint>

namespace skyrl_fast {

// Assigns items, largest first, to the part with the smallest load (LPT rule, Graham 1969), with
// the fewest parts, a multiple of `multiple`, whose loads are within the budget or that hold one
// item. Parts are numbered by decreasing load. Returns their number, at least `multiple`.
int64_t balanced_parts_cpu(const int64_t* loads, int64_t num_items, int64_t budget,
                           int64_t multiple, int64_t* parts);

}  // namespace skyrl_fast
