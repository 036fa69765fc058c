// The LPT rule with as many parts as it needs.
#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "passes/balanced_parts.h"

namespace skyrl_fast {
namespace {

// No fewer parts than this can hold the items.
int64_t least_parts(const int64_t* loads, int64_t num_items, int64_t budget) {
  int64_t alone = 0, halves = 0, rest = 0;
  for (int64_t i = 0; i < num_items; ++i) {
    if (loads[i] > budget) {
      ++alone;
      continue;
    }
    halves += 2 * loads[i] > budget;  // no two of them fit in one part
    rest += loads[i];
  }
  return alone + std::max(halves, (rest + budget - 1) / budget);
}

// Assigns the items in this order; returns whether the loads are within the budget.
bool assign_parts(const int64_t* loads, const std::vector<int64_t>& order, int64_t budget,
                  int64_t num_parts, int64_t* parts, std::vector<int64_t>* part_loads) {
  using Load = std::pair<int64_t, int64_t>;  // and its part
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> smallest;
  for (int64_t part = 0; part < num_parts; ++part) smallest.emplace(0, part);
  part_loads->assign(num_parts, 0);
  std::vector<uint8_t> used(num_parts, 0);
  for (const int64_t item : order) {
    const int64_t part = smallest.top().second, load = smallest.top().first + loads[item];
    if (used[part] && load > budget) return false;
    used[part] = 1;
    parts[item] = part;
    (*part_loads)[part] = load;
    smallest.pop();
    smallest.emplace(load, part);
  }
  return true;
}

}  // namespace

int64_t balanced_parts_cpu(const int64_t* loads, int64_t num_items, int64_t budget,
                           int64_t multiple, int64_t* parts) {
  std::vector<int64_t> order(num_items), part_loads;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return loads[a] > loads[b]; });
  const int64_t least = least_parts(loads, num_items, budget);
  int64_t num_parts = std::max<int64_t>(1, (least + multiple - 1) / multiple) * multiple;
  while (!assign_parts(loads, order, budget, num_parts, parts, &part_loads)) num_parts += multiple;
  std::vector<int64_t> by_load(num_parts), number(num_parts);
  std::iota(by_load.begin(), by_load.end(), 0);
  std::stable_sort(by_load.begin(), by_load.end(),
                   [&](int64_t a, int64_t b) { return part_loads[a] > part_loads[b]; });
  for (int64_t i = 0; i < num_parts; ++i) number[by_load[i]] = i;
  for (int64_t i = 0; i < num_items; ++i) parts[i] = number[parts[i]];
  return num_parts;
}

}  // namespace skyrl_fast
