// Rows of prefix trees in passes within a budget of nodes. n rows, depth first.
#pragma once

#include <cstdint>
#include <vector>

#include "prefix_tree/prefix_tree.h"

namespace skyrl_fast {

// The n rows of a trie, depth first.
struct SortedRows {
  std::vector<int64_t> rows;
  std::vector<int64_t> indices;  // in the rows that the trie was built from
  std::vector<int64_t> lengths;  // in nodes
  std::vector<int64_t> shared;   // nodes shared with the row before it
};

// (n,) nodes that each row shares with the last row before it of the same key, 0 for the first of a
// key; and for negative keys, which take no part.
std::vector<int64_t> shared_of_keys(const std::vector<int64_t>& shared,
                                    const std::vector<int64_t>& keys);

// The places, from 0 to n, where to cut the rows of one group so that pieces of at most `budget`
// nodes repeat the fewest nodes, then the fewest pieces. A unit is not cut and may be larger.
//   lengths  (n,) nodes of each row
//   shared   (n,) nodes shared with the row before it; 0 for the first
//   units    (n,) no cut between rows of equal units; empty: cuts anywhere
std::vector<int64_t> cheapest_cuts(const std::vector<int64_t>& lengths,
                                   const std::vector<int64_t>& shared, int64_t budget,
                                   const std::vector<int64_t>& units);

// The pass of each row, and their number. Rows of a group stay together if the budget allows; a
// larger group is cut where that repeats the fewest nodes.
//   groups        (n,) dense ids; negative: the row is in no pass
//   trajectories  (n,) rows of equal ones stay together; empty: any split
std::vector<int64_t> passes_of_rows(const GroupTrie& trie, const TreeRows& all,
                                    const SortedRows& sorted, const std::vector<int64_t>& groups,
                                    const std::vector<int64_t>& trajectories, int64_t budget,
                                    int64_t* num_passes);

}  // namespace skyrl_fast
