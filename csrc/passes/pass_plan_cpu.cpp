// Planning passes: trees where these are chosen, sequences for the rest.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "core/parallel.h"
#include "core/row_layout.h"
#include "passes/pass_plan.h"
#include "passes/sequence_runs.h"
#include "passes/tree_cuts.h"
#include "prefix_tree/prefix_tree.h"

namespace skyrl_fast {
namespace {

using Numbers = std::vector<int64_t>;

// Pairs of tokens that attend in a causal row of this length.
double num_pairs(int64_t length) {
  return static_cast<double>(length) * static_cast<double>(length + 1) / 2;
}

// The place of each row's group among the sorted ids.
Numbers dense_groups(const PassRows& rows) {
  Numbers ids(rows.group_ids, rows.group_ids + rows.num_rows);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  Numbers groups(rows.num_rows);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    groups[row] = std::lower_bound(ids.begin(), ids.end(), rows.group_ids[row]) - ids.begin();
  }
  return groups;
}

// How many of the limits each row exceeds.
Numbers exceeded_limits(const PassRows& rows, const Numbers& limits) {
  Numbers exceeded(rows.num_rows, 0);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    for (const int64_t limit : limits) exceeded[row] += rows.length(row) > limit;
  }
  return exceeded;
}

void check_lengths(const PassRows& rows, const Numbers& visited, int64_t longest_row) {
  for (const int64_t row : visited) {
    if (longest_row == 0 || rows.length(row) <= longest_row) continue;
    throw std::invalid_argument(
        "plan_micro_batches: row " + std::to_string(row) + " has " +
        std::to_string(rows.length(row)) +
        " tokens, but the rotary embedding (dynamic) of this model depends on other rows beyond "
        "max_position_embeddings=" +
        std::to_string(longest_row));
  }
}

Numbers flagged(const std::vector<uint8_t>& flags) {
  Numbers rows;
  for (size_t row = 0; row < flags.size(); ++row) {
    if (flags[row]) rows.push_back(static_cast<int64_t>(row));
  }
  return rows;
}

// Counts the segments of a tree from its rows, depth first.
class SegmentCount {
 public:
  // Returns how many more there are with a row that shares some nodes with the one before it.
  int64_t add(int64_t length, int64_t shared) {
    if (length <= shared) return 0;
    while (!forks_.empty() && forks_.back() > shared) forks_.pop_back();
    const bool continues = shared > 0 && shared == branch_;
    const bool is_fork = shared > 0 && shared < branch_;
    branch_ = length;
    if (continues) return 0;
    if (!is_fork || (!forks_.empty() && forks_.back() == shared)) return 1;
    forks_.push_back(shared);
    return 2;
  }

 private:
  int64_t branch_ = 0;  // nodes from the root to the last leaf
  Numbers forks_;       // depths on the path to it
};

// Seconds of each group in the layers, in both layouts; whether it takes less as a tree.
std::vector<uint8_t> cheaper_as_trees(const PassRows& rows, const SortedRows& sorted,
                                      const Numbers& groups, const Numbers& hosts,
                                      const LayoutCosts& costs) {
  struct Sizes {
    double nodes = 0, tree_pairs = 0, segments = 0, tokens = 0, pairs = 0;
    SegmentCount count;
  };
  std::vector<Sizes> sizes(*std::max_element(groups.begin(), groups.end()) + 1);
  const int64_t count = static_cast<int64_t>(sorted.rows.size());
  Numbers keys(count);
  for (int64_t i = 0; i < count; ++i) keys[i] = groups[sorted.rows[i]];
  const Numbers shared = shared_of_keys(sorted.shared, keys);
  std::vector<uint8_t> is_host(rows.num_rows, 0);
  for (int64_t i = 0; i < count; ++i) {
    Sizes& group = sizes[keys[i]];
    group.nodes += static_cast<double>(sorted.lengths[i] - shared[i]);
    group.tree_pairs += num_pairs(sorted.lengths[i]) - num_pairs(shared[i]);
    group.segments += static_cast<double>(group.count.add(sorted.lengths[i], shared[i]));
    is_host[hosts[sorted.rows[i]]] = 1;
  }
  for (const int64_t host : flagged(is_host)) {
    Sizes& group = sizes[groups[host]];
    group.tokens += static_cast<double>(rows.length(host));
    group.pairs += num_pairs(rows.length(host));
  }
  std::vector<uint8_t> cheaper;
  for (const Sizes& group : sizes) {
    cheaper.push_back(costs.tree_token * group.nodes + costs.tree_pair * group.tree_pairs +
                          costs.tree_segment * group.segments <=
                      costs.sequence_token * group.tokens + costs.sequence_pair * group.pairs);
  }
  return cheaper;
}

// Sequences that share a pass where possible: those of a trajectory, or one.
struct Units {
  std::vector<Numbers> hosts;
  Numbers widths, counts, kinds;
};

Units sequence_units(const PassRows& rows, const Numbers& hosts, const Numbers& exceeded,
                     bool keep_trajectories) {
  std::vector<Numbers> units;
  DenseIds unit_of(static_cast<int64_t>(hosts.size()));
  for (const int64_t host : hosts) {
    const int64_t unit = unit_of(keep_trajectories ? rows.trajectory_ids[host] : host);
    if (unit == static_cast<int64_t>(units.size())) units.emplace_back();
    units[unit].push_back(host);
  }
  const auto width = [&](const Numbers& unit) {
    int64_t longest = 0;
    for (const int64_t host : unit) longest = std::max(longest, rows.length(host));
    return longest;
  };
  const auto id = [&](const Numbers& unit) {
    return keep_trajectories ? rows.trajectory_ids[unit[0]] : unit[0];
  };
  Numbers widths, order(units.size());
  for (const Numbers& unit : units) {
    widths.push_back(width(unit));
    for (const int64_t host : unit) {
      if (exceeded[host] == exceeded[unit[0]]) continue;
      int64_t shortest = widths.back();
      for (const int64_t other : unit) shortest = std::min(shortest, rows.length(other));
      throw std::invalid_argument(
          "plan_micro_batches: trajectory " + std::to_string(id(unit)) + " has rows of " +
          std::to_string(shortest) + " and " + std::to_string(widths.back()) +
          " tokens, which this loss needs in one pass, but the rotary embedding of this model "
          "depends on the longest row of a pass");
    }
  }
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return widths[a] != widths[b] ? widths[a] > widths[b] : id(units[a]) < id(units[b]);
  });
  Units sorted;
  for (const int64_t i : order) {
    sorted.widths.push_back(widths[i]);
    sorted.counts.push_back(static_cast<int64_t>(units[i].size()));
    sorted.kinds.push_back(exceeded[units[i][0]]);
    sorted.hosts.push_back(std::move(units[i]));
  }
  return sorted;
}

void check_layout(bool is_right, const char* expected) {
  if (is_right) return;
  throw std::invalid_argument(std::string("plan_passes: layouts: expected ") + expected +
                              ", got others");
}

// The distinct rows of a layout, each with a trained token.
Numbers checked_rows(const PassLayout& layout, const Numbers& num_trained) {
  const int64_t num_rows = static_cast<int64_t>(num_trained.size());
  int64_t before = -1;
  for (int64_t i = 0; i < layout.num_rows; ++i) {
    const int64_t row = layout.rows[i];
    check_layout(row > before && row < num_rows, "ascending rows of the batch");
    check_layout(num_trained[row] > 0, "rows with a trained token");
    check_layout(layout.places[i] >= 0 && layout.places[i] < layout.num_rows,
                 "places among the rows of a pass");
    before = row;
  }
  return {layout.rows, layout.rows + layout.num_rows};
}

}  // namespace

PassPlan::PassPlan(const PassRows& rows, const uint8_t* visited, const PassOptions& options,
                   int num_threads)
    : needed_(rows.num_rows, 0), num_trained_(rows.num_rows, 0), as_sequence_(rows.num_rows, 0) {
  count_trained(rows, visited, num_threads);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    as_sequence_[row] = num_trained_[row] > 0;
    if (num_trained_[row] > 0 && rows.prompt(row) < 1) {
      throw std::invalid_argument("plan_micro_batches: row " + std::to_string(row) +
                                  " is trained but has an empty prompt");
    }
  }
  if (options.tree) plan_trees(rows, options, num_threads);
  plan_sequences(rows, options, num_threads);
}

PassPlan::PassPlan(const PassRows& rows, const std::vector<PassLayout>& layouts, int num_threads)
    : needed_(rows.num_rows, 0), num_trained_(rows.num_rows, 0) {
  const std::vector<uint8_t> visited(rows.num_rows, 1);
  count_trained(rows, visited.data(), num_threads);
  for (const PassLayout& layout : layouts) {
    Pass pass;
    pass.is_tree = layout.is_tree;
    add_rows(checked_rows(layout, num_trained_), &pass);
    for (const int64_t row : pass.rows) check_layout(rows.prompt(row) > 0, "rows with a prompt");
    if (pass.is_tree) {
      lay_out_tree(layout, &pass);
    } else {
      lay_out_sequences(rows, layout, &pass);
    }
    passes_.push_back(std::move(pass));
  }
}

void PassPlan::lay_out_tree(const PassLayout& layout, Pass* pass) const {
  int64_t before = 0;  // nodes of the row before
  std::vector<uint8_t> is_placed(layout.num_rows, 0);
  for (int64_t i = 0; i < layout.num_rows; ++i) {
    const int64_t place = layout.places[i], shared = layout.shared[i];
    const int64_t nodes = needed_[pass->rows[place]];
    check_layout(!is_placed[place], "each row of a tree once");
    check_layout(shared >= 0 && shared <= std::min(before, nodes), "nodes that both rows have");
    is_placed[place] = 1;
    pass->order.push_back(place);
    pass->shared.push_back(shared);
    pass->width += nodes - shared;
    before = nodes;
  }
}

void PassPlan::lay_out_sequences(const PassRows& rows, const PassLayout& layout, Pass* pass) const {
  pass->sequence_of_row.assign(layout.places, layout.places + layout.num_rows);
  int64_t count = 0;
  for (const int64_t place : pass->sequence_of_row) count = std::max(count, place + 1);
  // A row is extended by later ones: the last of a sequence is the one that it holds.
  pass->sequences.assign(count, -1);
  for (int64_t i = 0; i < layout.num_rows; ++i) {
    pass->sequences[layout.places[i]] = pass->rows[i];
  }
  for (const int64_t host : pass->sequences) {
    check_layout(host >= 0, "a row in each sequence");
    pass->width = std::max(pass->width, rows.length(host));
  }
  for (int64_t i = 0; i < layout.num_rows; ++i) {
    const int64_t host = pass->sequences[layout.places[i]];
    check_layout(rows.length(pass->rows[i]) <= rows.length(host), "rows within their sequence");
  }
}

void PassPlan::write_layout(int64_t number, int64_t* rows, int64_t* places, int64_t* shared) const {
  const Pass& pass = passes_.at(number);
  const Numbers& of_rows = pass.is_tree ? pass.order : pass.sequence_of_row;
  std::copy(pass.rows.begin(), pass.rows.end(), rows);
  std::copy(of_rows.begin(), of_rows.end(), places);
  if (pass.is_tree) {
    std::copy(pass.shared.begin(), pass.shared.end(), shared);
  } else {
    std::fill_n(shared, pass.rows.size(), 0);
  }
}

void PassPlan::count_trained(const PassRows& rows, const uint8_t* visited, int num_threads) {
  const int64_t mean = rows.num_rows > 0 ? rows.cu_responses[rows.num_rows] / rows.num_rows : 0;
  const int64_t grain = kRowCellsPerThread / (mean + 1) + 1;
  parallel_for(num_threads, rows.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (!visited[row]) continue;
      const uint8_t* trained = rows.trained + rows.cu_responses[row];
      int64_t count = 0, last = -1;
      for (int64_t i = 0; i < rows.response(row); ++i) {
        count += trained[i] != 0;
        if (trained[i]) last = i;
      }
      num_trained_[row] = count;
      needed_[row] = count > 0 ? rows.prompt(row) + last : 0;
    }
  });
}

void PassPlan::plan_trees(const PassRows& rows, const PassOptions& options, int num_threads) {
  const Numbers visited = flagged(as_sequence_);
  if (visited.empty()) return;
  TreeRows all;
  all.num_rows = rows.num_rows;
  all.tokens = rows.tokens;
  all.starts = rows.cu_tokens;
  all.lengths = needed_.data();
  Numbers num_routes;
  if (rows.routes != nullptr) {
    for (int64_t row = 0; row < rows.num_rows; ++row) num_routes.push_back(rows.num_routes(row));
    all.labels = rows.routes;
    all.label_starts = rows.cu_routes;
    all.label_counts = num_routes.data();
    all.label_bytes = rows.route_bytes;
  }
  GroupTrie trie;
  trie.build(all, visited);
  SortedRows sorted;
  trie.sort_rows(all, &sorted.indices, &sorted.shared);
  const Numbers dense = dense_groups(rows);
  Numbers groups, trajectories;
  for (const int64_t index : sorted.indices) {
    const int64_t row = visited[index];
    sorted.rows.push_back(row);
    sorted.lengths.push_back(needed_[row]);
    groups.push_back(dense[row]);
    if (options.keep_trajectories) trajectories.push_back(rows.trajectory_ids[row]);
  }
  if (options.costs != nullptr) {
    const Numbers hosts =
        sequence_hosts(rows, visited, exceeded_limits(rows, {}), needed_.data(), num_threads);
    const std::vector<uint8_t> cheaper =
        cheaper_as_trees(rows, sorted, dense, hosts, *options.costs);
    for (int64_t& group : groups) group = cheaper[group] ? group : -1;
  }
  if (std::all_of(groups.begin(), groups.end(), [](int64_t group) { return group < 0; })) return;
  int64_t num_passes = 0;
  const Numbers passes =
      passes_of_rows(trie, all, sorted, groups, trajectories, options.token_budget, &num_passes);
  std::vector<Numbers> members(num_passes);
  Numbers pass_of_row(rows.num_rows, -1), place(rows.num_rows, 0);
  for (size_t i = 0; i < passes.size(); ++i) pass_of_row[sorted.rows[i]] = passes[i];
  for (const int64_t row : visited) {
    if (pass_of_row[row] < 0) continue;
    as_sequence_[row] = 0;
    place[row] = static_cast<int64_t>(members[pass_of_row[row]].size());
    members[pass_of_row[row]].push_back(row);
  }
  passes_.resize(num_passes);
  for (int64_t i = 0; i < num_passes; ++i) {
    passes_[i].is_tree = true;
    add_rows(members[i], &passes_[i]);
  }
  const Numbers shared = shared_of_keys(sorted.shared, passes);
  for (size_t i = 0; i < passes.size(); ++i) {
    if (passes[i] < 0) continue;
    Pass& pass = passes_[passes[i]];
    pass.order.push_back(place[sorted.rows[i]]);
    pass.shared.push_back(shared[i]);
    pass.width += sorted.lengths[i] - shared[i];
  }
}

void PassPlan::plan_sequences(const PassRows& rows, const PassOptions& options, int num_threads) {
  const Numbers visited = flagged(as_sequence_);
  if (visited.empty()) return;
  check_lengths(rows, visited, options.longest_row);
  const Numbers exceeded = exceeded_limits(rows, options.length_limits);
  const Numbers hosts = sequence_hosts(rows, visited, exceeded, needed_.data(), num_threads);
  std::vector<Numbers> members(rows.num_rows);
  Numbers sequences;
  for (const int64_t row : visited) {
    if (members[hosts[row]].empty()) sequences.push_back(hosts[row]);
    members[hosts[row]].push_back(row);
  }
  const Units units = sequence_units(rows, sequences, exceeded, options.keep_trajectories);
  const Numbers cuts = cheapest_runs(units.widths, units.counts, units.kinds, options.token_budget);
  Numbers sequence_of_row(rows.num_rows, -1);
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    Pass pass;
    Numbers pass_rows;
    for (int64_t unit = cuts[i]; unit < cuts[i + 1]; ++unit) {
      for (const int64_t host : units.hosts[unit]) {
        for (const int64_t row : members[host]) {
          sequence_of_row[row] = static_cast<int64_t>(pass.sequences.size());
          pass_rows.push_back(row);
        }
        pass.sequences.push_back(host);
        pass.width = std::max(pass.width, rows.length(host));
      }
    }
    std::sort(pass_rows.begin(), pass_rows.end());
    add_rows(pass_rows, &pass);
    for (const int64_t row : pass_rows) pass.sequence_of_row.push_back(sequence_of_row[row]);
    passes_.push_back(std::move(pass));
  }
}

void PassPlan::add_rows(const Numbers& rows, Pass* pass) const {
  pass->rows = rows;
  for (const int64_t row : rows) pass->num_trained += num_trained_[row];
}

}  // namespace skyrl_fast
