// Cuts of trees by dynamic programming over the rows in depth-first order.
#include <algorithm>
#include <deque>
#include <unordered_map>
#include <utility>

#include "passes/balanced_parts.h"
#include "passes/tree_cuts.h"

namespace skyrl_fast {
namespace {

using Numbers = std::vector<int64_t>;

int64_t count(const Numbers& values) { return static_cast<int64_t>(values.size()); }

// 0, the places where no unit has rows on both sides, and n.
Numbers allowed_places(const Numbers& units, int64_t num_rows) {
  Numbers places;
  if (units.empty()) {
    for (int64_t place = 0; place <= num_rows; ++place) places.push_back(place);
    return places;
  }
  std::unordered_map<int64_t, int64_t> last;
  for (int64_t i = 0; i < num_rows; ++i) last[units[i]] = i;
  places.push_back(0);
  int64_t reach = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    reach = std::max(reach, last[units[i]]);
    if (reach == i) places.push_back(i + 1);
  }
  return places;
}

// The nodes that all rows of a group share, such as those of a system prompt.
int64_t common_to_all(const SortedRows& sorted, const Numbers& groups) {
  Numbers one_key(groups);
  for (int64_t& key : one_key) key = std::min<int64_t>(key, 0);
  const Numbers shared = shared_of_keys(sorted.shared, one_key);
  int64_t common = -1;
  for (int64_t i = 0; i < count(groups); ++i) {
    if (groups[i] < 0) continue;
    common = common < 0 ? sorted.lengths[i] : std::min({common, sorted.lengths[i], shared[i]});
  }
  return std::max<int64_t>(0, common);
}

// Rows that share a pass, and their nodes.
struct Pieces {
  std::vector<Numbers> ranks;
  Numbers sizes;

  void add(Numbers piece, int64_t size) {
    ranks.push_back(std::move(piece));
    sizes.push_back(size);
  }
};

// Adds complete trajectories, as many to a piece as the budget allows.
void add_by_trajectory(const SortedRows& sorted, const Numbers& piece, const Numbers& trajectories,
                       int64_t budget, CoveredNodes* covered, Pieces* pieces) {
  std::vector<Numbers> members;  // of each trajectory, in the order of first appearance
  std::unordered_map<int64_t, size_t> number;
  for (const int64_t rank : piece) {
    const auto [found, is_new] = number.try_emplace(trajectories[rank], members.size());
    if (is_new) members.emplace_back();
    members[found->second].push_back(rank);
  }
  Numbers chosen;
  covered->clear();
  for (const Numbers& ranks : members) {
    const int64_t before = covered->size();
    for (const int64_t rank : ranks) covered->add(sorted.indices[rank]);
    if (!chosen.empty() && covered->size() > budget) {
      pieces->add(std::move(chosen), before);
      chosen.clear();
      covered->clear();
      for (const int64_t rank : ranks) covered->add(sorted.indices[rank]);
    }
    chosen.insert(chosen.end(), ranks.begin(), ranks.end());
  }
  pieces->add(std::move(chosen), covered->size());
}

// The ranks of the rows of each group, groups in the order of their ids.
std::vector<Numbers> rows_by_group(const Numbers& groups) {
  std::vector<Numbers> ranks;
  for (int64_t i = 0; i < count(groups); ++i) {
    if (groups[i] < 0) continue;
    if (groups[i] >= static_cast<int64_t>(ranks.size())) ranks.resize(groups[i] + 1);
    ranks[groups[i]].push_back(i);
  }
  return ranks;
}

Numbers taken(const Numbers& values, const Numbers& indices) {
  Numbers result;
  result.reserve(indices.size());
  for (const int64_t i : indices) result.push_back(values[i]);
  return result;
}

}  // namespace

Numbers shared_of_keys(const Numbers& shared, const Numbers& keys) {
  Numbers result(shared.size(), 0), last;
  // The suffixes' least values: places ascending, and values too.
  std::vector<std::pair<int64_t, int64_t>> least;
  for (int64_t i = 0; i < count(shared); ++i) {
    while (!least.empty() && least.back().second >= shared[i]) least.pop_back();
    least.emplace_back(i, shared[i]);
    const int64_t key = keys[i];
    if (key < 0) continue;
    if (key >= count(last)) last.resize(key + 1, -1);
    if (last[key] >= 0) {
      const auto first_after =
          std::upper_bound(least.begin(), least.end(), last[key],
                           [](int64_t place, const auto& entry) { return place < entry.first; });
      result[i] = first_after->second;
    }
    last[key] = i;
  }
  return result;
}

Numbers cheapest_cuts(const Numbers& lengths, const Numbers& shared, int64_t budget,
                      const Numbers& units) {
  const int64_t num_rows = count(lengths);
  Numbers fresh(num_rows);  // running sums of the nodes that a row adds to the one before it
  for (int64_t i = 0; i < num_rows; ++i) {
    fresh[i] = lengths[i] - shared[i] + (i > 0 ? fresh[i - 1] : 0);
  }
  const Numbers places = allowed_places(units, num_rows);
  using Cost = std::pair<int64_t, int64_t>;  // repeated nodes and pieces before each place
  std::vector<Cost> cost{{0, 0}};
  Numbers back{0};
  // The possible beginnings of the piece that ends here, best first: a minimum over a sliding
  // window.
  std::deque<int64_t> window;
  const auto with_path = [&](int64_t number) {
    return Cost(cost[number].first + shared[places[number]], cost[number].second);
  };
  const auto size = [&](int64_t number, int64_t last) {
    return lengths[places[number]] + fresh[last] - fresh[places[number]];
  };
  for (int64_t number = 1; number < count(places); ++number) {
    while (!window.empty() && with_path(window.back()) > with_path(number - 1)) window.pop_back();
    window.push_back(number - 1);
    while (window.size() > 1 && size(window.front(), places[number] - 1) > budget) {
      window.pop_front();
    }
    const Cost best = with_path(window.front());
    cost.emplace_back(best.first, best.second + 1);
    back.push_back(window.front());
  }
  Numbers cuts{count(places) - 1};
  while (cuts.back() > 0) cuts.push_back(back[cuts.back()]);
  std::reverse(cuts.begin(), cuts.end());
  return taken(places, cuts);
}

Numbers passes_of_rows(const GroupTrie& trie, const TreeRows& all, const SortedRows& sorted,
                       const Numbers& groups, const Numbers& trajectories, int64_t budget,
                       int64_t* num_passes) {
  const Numbers shared_in_group = shared_of_keys(sorted.shared, groups);
  Pieces pieces;
  CoveredNodes covered(trie, all);
  for (const Numbers& ranks : rows_by_group(groups)) {
    if (ranks.empty()) continue;
    const Numbers lengths = taken(sorted.lengths, ranks), shared = taken(shared_in_group, ranks);
    Numbers fresh(ranks.size() + 1, 0);
    for (size_t i = 0; i < ranks.size(); ++i) fresh[i + 1] = fresh[i] + lengths[i] - shared[i];
    Numbers cuts{0, count(ranks)};
    if (fresh.back() > budget) {
      cuts = cheapest_cuts(lengths, shared, budget,
                           trajectories.empty() ? Numbers() : taken(trajectories, ranks));
    }
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int64_t first = cuts[i], last = cuts[i + 1];
      Numbers piece(ranks.begin() + first, ranks.begin() + last);
      const int64_t size = shared[first] + fresh[last] - fresh[first];
      if (size > budget && !trajectories.empty()) {
        add_by_trajectory(sorted, piece, trajectories, budget, &covered, &pieces);
      } else {
        pieces.add(std::move(piece), size);
      }
    }
  }
  int64_t common = common_to_all(sorted, groups);  // once per pass, however many groups it has
  if (common >= budget) common = 0;
  for (int64_t& size : pieces.sizes) size -= common;
  Numbers part(pieces.sizes.size());
  *num_passes =
      balanced_parts_cpu(pieces.sizes.data(), count(pieces.sizes), budget - common, 1, part.data());
  Numbers passes(groups.size(), -1);
  for (size_t i = 0; i < part.size(); ++i) {
    for (const int64_t rank : pieces.ranks[i]) passes[rank] = part[i];
  }
  return passes;
}

}  // namespace skyrl_fast
