// One walk over a pass's rows: tokens, states of trained tokens, and then the distinct ones.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "passes/pass_arrays.h"

namespace skyrl_fast {
namespace {

using Numbers = std::vector<int64_t>;

// Calls fn(index of the token in the row's response) for each trained token of a row.
template <typename Fn>
void for_each_trained(const PassRows& rows, int64_t row, const Fn& fn) {
  const uint8_t* trained = rows.trained + rows.cu_responses[row];
  for (int64_t i = 0; i < rows.response(row); ++i) {
    if (trained[i]) fn(i);
  }
}

// A row of the pass: where its trained tokens are among the M, and its responses among the pass's.
struct Place {
  int64_t trained, response;
};

std::vector<Place> places_of_rows(const PassRows& rows, const PassPlan& plan, const Pass& pass) {
  std::vector<Place> places;
  Place next{0, 0};
  for (const int64_t row : pass.rows) {
    places.push_back(next);
    next.trained += plan.num_trained(row);
    next.response += rows.response(row);
  }
  return places;
}

void write_route(const PassRows& rows, int64_t row, int64_t position, int64_t at,
                 const PassArrays& out) {
  if (out.routes == nullptr) return;
  const bool is_recorded = position < rows.num_routes(row);
  out.has_no_route[at] = !is_recorded;
  uint8_t* cell = out.routes + at * rows.route_bytes;
  if (is_recorded) {
    std::memcpy(cell, rows.routes + (rows.cu_routes[row] + position) * rows.route_bytes,
                rows.route_bytes);
  } else {
    std::memset(cell, 0, rows.route_bytes);
  }
}

// Writes the trained tokens of a row; `state` returns that of the token at a position.
template <typename State>
void write_trained(const PassRows& rows, int64_t row, const Place& place, const State& state,
                   const PassArrays& out) {
  int64_t m = place.trained;
  const int64_t prompt = rows.prompt(row);
  for_each_trained(rows, row, [&](int64_t i) {
    out.hidden_index[m] = state(prompt + i - 1);
    out.target_ids[m] = rows.tokens[rows.cu_tokens[row] + prompt + i];
    out.response_index[m] = place.response + i;
    ++m;
  });
}

void write_sequences(const PassRows& rows, const Pass& pass, const std::vector<Place>& places,
                     const PassArrays& out) {
  for (int64_t s = 0; s < pass.num_sequences(); ++s) {
    const int64_t row = pass.sequences[s], length = rows.length(row);
    int64_t* ids = out.input_ids + s * pass.width;
    std::copy_n(rows.tokens + rows.cu_tokens[row], length, ids);
    std::fill(ids + length, ids + pass.width, 0);
    for (int64_t j = 0; j < pass.width; ++j) write_route(rows, row, j, s * pass.width + j, out);
  }
  for (size_t i = 0; i < pass.rows.size(); ++i) {
    const int64_t first = pass.sequence_of_row[i] * pass.width;
    write_trained(
        rows, pass.rows[i], places[i], [&](int64_t position) { return first + position; }, out);
  }
}

void write_tree(const PassRows& rows, const PassPlan& plan, const Pass& pass,
                const std::vector<Place>& places, const PassArrays& out) {
  std::vector<int32_t> path;  // the nodes of the row
  int32_t node = 0;
  const auto close = [&](int64_t depth) {
    for (; static_cast<int64_t>(path.size()) > depth; path.pop_back()) out.ends[path.back()] = node;
  };
  for (size_t k = 0; k < pass.order.size(); ++k) {
    const int64_t i = pass.order[k], row = pass.rows[i];
    close(pass.shared[k]);
    for (int64_t j = pass.shared[k]; j < plan.needed(row); ++j, ++node) {
      out.input_ids[node] = rows.tokens[rows.cu_tokens[row] + j];
      out.parents[node] = path.empty() ? -1 : path.back();
      out.positions[node] = j;
      write_route(rows, row, j, node, out);
      path.push_back(node);
    }
    write_trained(rows, row, places[i], [&](int64_t position) { return path[position]; }, out);
  }
  close(0);
}

// (M,) views of the kept tokens of each trained token.
std::vector<std::string_view> kept_sets(const PassRows& rows, const Pass& pass,
                                        const KeptRows& kept) {
  std::vector<std::string_view> sets;
  sets.reserve(pass.num_trained);
  for (const int64_t row : pass.rows) {
    const int32_t* ids = kept.ids + kept.cu_kept[row];
    const int32_t* counts = kept.num_kept + rows.cu_responses[row];
    for (int64_t i = 0; i < rows.response(row); ids += counts[i++]) {
      if (rows.trained[rows.cu_responses[row] + i] == 0) continue;
      sets.emplace_back(reinterpret_cast<const char*>(ids), counts[i] * sizeof(int32_t));
    }
  }
  return sets;
}

// (M,) equal where the sets are, in the order of first appearance.
Numbers set_numbers(const std::vector<std::string_view>& sets) {
  std::unordered_map<std::string_view, int64_t> seen;
  Numbers numbers;
  numbers.reserve(sets.size());
  for (const std::string_view& set : sets) {
    numbers.push_back(seen.try_emplace(set, static_cast<int64_t>(seen.size())).first->second);
  }
  return numbers;
}

// The trained tokens by state, target and set: nodes by counting, those of a node by comparing.
Numbers sort_trained(const Pass& pass, const Numbers& sets, const PassArrays& out) {
  Numbers begins(pass.width + 1, 0), order(pass.num_trained);
  for (int64_t m = 0; m < pass.num_trained; ++m) ++begins[out.hidden_index[m] + 1];
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  Numbers next(begins);
  for (int64_t m = 0; m < pass.num_trained; ++m) order[next[out.hidden_index[m]]++] = m;
  const auto key = [&](int64_t m) {
    return std::make_tuple(out.target_ids[m], sets.empty() ? 0 : sets[m], m);
  };
  for (int64_t node = 0; node < pass.width; ++node) {
    if (begins[node + 1] - begins[node] < 2) continue;
    std::sort(order.begin() + begins[node], order.begin() + begins[node + 1],
              [&](int64_t a, int64_t b) { return key(a) < key(b); });
  }
  return order;
}

// Keeps one of equal trained tokens; returns the kept ones' numbers, (K,).
Numbers keep_distinct(const Pass& pass, const Numbers& sets, const PassArrays& out) {
  const Numbers order = sort_trained(pass, sets, out);
  Numbers distinct;
  for (const int64_t m : order) {
    const bool is_copy = !distinct.empty() &&
                         out.hidden_index[m] == out.hidden_index[distinct.back()] &&
                         out.target_ids[m] == out.target_ids[distinct.back()] &&
                         (sets.empty() || sets[m] == sets[distinct.back()]);
    if (!is_copy) distinct.push_back(m);
    out.copies[m] = static_cast<int64_t>(distinct.size()) - 1;
  }
  if (static_cast<int64_t>(distinct.size()) == pass.num_trained) {
    std::iota(distinct.begin(), distinct.end(), 0);
    return distinct;
  }
  Numbers states, targets;
  for (const int64_t m : distinct) {
    states.push_back(out.hidden_index[m]);
    targets.push_back(out.target_ids[m]);
  }
  std::copy(states.begin(), states.end(), out.hidden_index);
  std::copy(targets.begin(), targets.end(), out.target_ids);
  return distinct;
}

}  // namespace

int64_t num_kept_tokens(const PassRows& rows, const Pass& pass, const KeptRows& kept) {
  int64_t total = 0;
  for (const int64_t row : pass.rows) {
    for_each_trained(rows, row,
                     [&](int64_t i) { total += kept.num_kept[rows.cu_responses[row] + i]; });
  }
  return total;
}

int64_t write_pass_cpu(const PassRows& rows, const PassPlan& plan, const Pass& pass,
                       const KeptRows& kept, const PassArrays& out) {
  const std::vector<Place> places = places_of_rows(rows, plan, pass);
  std::copy(pass.rows.begin(), pass.rows.end(), out.rows);
  if (pass.is_tree) {
    write_tree(rows, plan, pass, places, out);
  } else {
    write_sequences(rows, pass, places, out);
  }
  std::vector<std::string_view> sets;
  if (kept.num_kept != nullptr) sets = kept_sets(rows, pass, kept);
  Numbers distinct(pass.num_trained);
  std::iota(distinct.begin(), distinct.end(), 0);
  if (pass.is_tree) distinct = keep_distinct(pass, set_numbers(sets), out);
  if (kept.num_kept != nullptr) {
    char* ids = reinterpret_cast<char*>(out.kept_ids);
    out.cu_kept[0] = 0;
    for (size_t k = 0; k < distinct.size(); ++k) {
      const std::string_view& set = sets[distinct[k]];
      std::copy(set.begin(), set.end(), ids);
      ids += set.size();
      out.cu_kept[k + 1] = out.cu_kept[k] + static_cast<int64_t>(set.size() / sizeof(int32_t));
    }
  }
  return static_cast<int64_t>(distinct.size());
}

}  // namespace skyrl_fast
