// Building prefix trees on the CPU: every token is compared once on the way down its row's path and
// written once; children are found by a hash table.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/parallel.h"
#include "core/row_layout.h"
#include "merge/merge.h"
#include "prefix_tree/prefix_tree.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kTokensPerThread = 1 << 18;  // below this a thread costs more than it saves
constexpr int64_t kSlotsPerRow = 4;            // a row adds two segments at most

uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15ull ^ (b + 0xD1B54A32D192ED03ull);
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ull;
  return x ^ (x >> 29);
}

}  // namespace

int64_t TreeRows::common(int64_t a, int64_t b, int64_t depth, int64_t n) const {
  if (a == b) return n;
  n = common_prefix(tokens + starts[a] + depth, tokens + starts[b] + depth, n);
  if (labels == nullptr || n == 0) return n;
  const int64_t fewer = std::min(label_counts[a], label_counts[b]);
  if (label_counts[a] != label_counts[b]) n = std::min(n, std::max<int64_t>(0, fewer - depth));
  const int64_t labelled = std::min(n, fewer - depth);
  if (labelled <= 0) return n;
  const uint8_t* left = labels + (label_starts[a] + depth) * label_bytes;
  const uint8_t* right = labels + (label_starts[b] + depth) * label_bytes;
  const int64_t equal = common_prefix(left, right, labelled * label_bytes) / label_bytes;
  return equal < labelled ? equal : n;
}

uint64_t TreeRows::hash_at(int64_t row, int64_t depth) const {
  uint64_t hash = static_cast<uint32_t>(tokens[starts[row] + depth]);
  if (labels == nullptr || depth >= label_counts[row]) return hash;
  const uint8_t* cell = labels + (label_starts[row] + depth) * label_bytes;
  for (int64_t i = 0; i < label_bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, cell + i, std::min<int64_t>(8, label_bytes - i));
    hash = mixed(hash, word);
  }
  return hash;
}

void GroupTrie::build(const TreeRows& all, std::vector<int64_t> rows) {
  rows_ = std::move(rows);
  const int64_t num_rows = static_cast<int64_t>(rows_.size());
  end_segments_.assign(num_rows, -1);
  size_t capacity = 4;
  while (capacity < static_cast<size_t>(kSlotsPerRow * num_rows)) capacity *= 2;
  slots_.assign(capacity, -1);
  // Longest first: where a segment is split, rows that ended in it ended at the split or below it,
  // so that the lower part, which keeps its number, is still their end.
  std::vector<int64_t> order(num_rows);
  for (int64_t i = 0; i < num_rows; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return all.lengths[rows_[a]] > all.lengths[rows_[b]];
  });
  for (const int64_t i : order) insert(all, rows_[i], &end_segments_[i]);
  order_children(end_segments_);
  for (const Segment& segment : segments_) num_nodes_ += segment.end - segment.begin;
  slots_ = {};
}

int32_t GroupTrie::find_child(const TreeRows& all, int32_t parent, int64_t row, int64_t depth,
                              uint64_t* slot) const {
  const uint64_t mask = slots_.size() - 1;
  uint64_t i = mixed(all.hash_at(row, depth), static_cast<uint32_t>(parent)) & mask;
  for (; slots_[i] >= 0; i = (i + 1) & mask) {
    const Segment& child = segments_[slots_[i]];
    if (child.parent == parent && all.common(row, child.row, depth, 1) == 1) break;
  }
  *slot = i;
  return slots_[i];
}

int32_t GroupTrie::add_segment(const Segment& segment) {
  segments_.push_back(segment);
  return static_cast<int32_t>(segments_.size() - 1);
}

void GroupTrie::insert(const TreeRows& all, int64_t row, int32_t* end_segment) {
  const int64_t length = all.lengths[row];
  int32_t parent = -1;
  for (int64_t depth = 0; depth < length;) {
    uint64_t slot;
    int32_t child = find_child(all, parent, row, depth, &slot);
    if (child < 0) {
      slots_[slot] = *end_segment = add_segment({row, depth, length, parent});
      return;
    }
    const Segment& other = segments_[child];
    const int64_t most = std::min(length, other.end) - depth;
    depth += all.common(row, other.row, depth, most);
    if (depth < other.end && depth < length) child = split(all, child, depth, slot);
    *end_segment = parent = child;
  }
}

// Cuts a segment in two; returns the new upper part. The lower one keeps its number, and with it
// its children and the rows that end in it.
int32_t GroupTrie::split(const TreeRows& all, int32_t lower, int64_t depth, uint64_t slot) {
  const Segment old = segments_[lower];
  const int32_t upper = add_segment({old.row, old.begin, depth, old.parent});
  slots_[slot] = upper;
  segments_[lower].begin = depth;
  segments_[lower].parent = upper;
  const bool found = find_child(all, upper, old.row, depth, &slot) >= 0;
  if (!found) slots_[slot] = lower;
  return upper;
}

// Children in the order of the first row through them.
void GroupTrie::order_children(const std::vector<int32_t>& row_segments) {
  std::vector<uint8_t> placed(segments_.size(), 0);
  for (int32_t segment : row_segments) {
    for (; segment >= 0 && !placed[segment]; segment = segments_[segment].parent) {
      placed[segment] = 1;
      const int32_t parent = segments_[segment].parent;
      int32_t& first = parent < 0 ? first_root_ : segments_[parent].first_child;
      int32_t& last = parent < 0 ? last_root_ : segments_[parent].last_child;
      (last < 0 ? first : segments_[last].next_sibling) = segment;
      last = segment;
    }
  }
}

std::vector<int32_t> GroupTrie::depth_first() const {
  std::vector<int32_t> order;
  order.reserve(segments_.size());
  int32_t next = first_root_;
  while (next >= 0) {
    order.push_back(next);
    if (segments_[next].first_child >= 0) {
      next = segments_[next].first_child;
      continue;
    }
    while (next >= 0 && segments_[next].next_sibling < 0) next = segments_[next].parent;
    if (next >= 0) next = segments_[next].next_sibling;
  }
  return order;
}

std::vector<GroupTrie::Place> GroupTrie::number_nodes(const std::vector<int32_t>& order,
                                                      int64_t first_node) const {
  std::vector<Place> places(segments_.size());
  int64_t node = first_node;
  for (const int32_t i : order) {
    const int64_t end = node + segments_[i].end - segments_[i].begin;
    places[i] = {node, end};
    node = end;
  }
  for (auto i = order.rbegin(); i != order.rend(); ++i) {
    const int32_t parent = segments_[*i].parent;
    if (parent >= 0) places[parent].end = std::max(places[parent].end, places[*i].end);
  }
  return places;
}

void GroupTrie::sort_rows(const TreeRows& all, std::vector<int64_t>* order,
                          std::vector<int64_t>* shared) const {
  const std::vector<Place> places = number_nodes(depth_first(), 0);
  const int64_t num_rows = static_cast<int64_t>(rows_.size());
  std::vector<int64_t> last_nodes(num_rows);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int32_t s = end_segments_[i];
    last_nodes[i] = places[s].first_node + all.lengths[rows_[i]] - segments_[s].begin - 1;
  }
  order->resize(num_rows);
  for (int64_t i = 0; i < num_rows; ++i) (*order)[i] = i;
  std::stable_sort(order->begin(), order->end(),
                   [&](int64_t a, int64_t b) { return last_nodes[a] < last_nodes[b]; });
  shared->assign(num_rows, 0);
  for (int64_t k = 1; k < num_rows; ++k) {
    // The row's nodes up to the other's last one: its own ones come after that.
    const int64_t row = (*order)[k], before = last_nodes[(*order)[k - 1]];
    int32_t s = end_segments_[row];
    while (s >= 0 && places[s].first_node > before) s = segments_[s].parent;
    if (s < 0) continue;
    const int64_t depth = segments_[s].begin + before - places[s].first_node + 1;
    (*shared)[k] = std::min({depth, segments_[s].end, all.lengths[rows_[row]]});
  }
}

void CoveredNodes::add(int64_t index) {
  int64_t end = all_.lengths[trie_.rows_[index]];
  for (int32_t s = trie_.end_segments_[index]; s >= 0; s = trie_.segments_[s].parent) {
    const int64_t begin = trie_.segments_[s].begin;
    const bool is_new = until_[s] == 0;
    if (is_new) covered_.push_back(s);
    size_ += std::max<int64_t>(0, end - std::max(begin, until_[s]));
    until_[s] = std::max(until_[s], end);
    if (!is_new) return;  // what is above it is covered, too
    end = begin;
  }
}

void CoveredNodes::clear() {
  for (const int32_t s : covered_) until_[s] = 0;
  covered_.clear();
  size_ = 0;
}

void GroupTrie::write(const TreeRows& all, int64_t first_node, const TreeArrays& out) const {
  const std::vector<int32_t> order = depth_first();
  const std::vector<Place> places = number_nodes(order, first_node);
  for (const int32_t i : order) {
    const Segment& segment = segments_[i];
    const Place& place = places[i];
    int64_t above = -1;
    if (segment.parent >= 0) {
      const Segment& parent = segments_[segment.parent];
      above = places[segment.parent].first_node + parent.end - parent.begin - 1;
    }
    const int64_t source = all.starts[segment.row] + segment.begin;
    for (int64_t j = 0; j < segment.end - segment.begin; ++j) {
      const int64_t n = place.first_node + j;
      out.tokens[n] = all.tokens[source + j];
      out.parents[n] = static_cast<int32_t>(j == 0 ? above : n - 1);
      out.positions[n] = static_cast<int32_t>(segment.begin + j);
      out.ends[n] = static_cast<int32_t>(place.end);
      out.sources[n] = source + j;
    }
  }
  for (size_t r = 0; r < rows_.size(); ++r) {
    int32_t* nodes = out.row_nodes + out.row_node_starts[rows_[r]];
    int64_t end = all.lengths[rows_[r]];
    for (int32_t i = end_segments_[r]; i >= 0; i = segments_[i].parent) {
      const int64_t begin = segments_[i].begin, first = places[i].first_node;
      for (int64_t j = begin; j < end; ++j) nodes[j] = static_cast<int32_t>(first + j - begin);
      end = begin;
    }
  }
}

PrefixTree::PrefixTree(const TreeRows& rows, const int64_t* group_ids, int num_threads) {
  DenseIds dense(64);
  std::vector<std::vector<int64_t>> members;
  int64_t num_tokens = 0;
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const size_t group = static_cast<size_t>(dense(group_ids[row]));
    if (group == members.size()) members.emplace_back();
    if (rows.lengths[row] > 0) members[group].push_back(row);
    num_tokens += rows.lengths[row];
  }
  tries_.resize(members.size());
  grain_ = kTokensPerThread / (num_tokens / std::max<int64_t>(1, num_groups()) + 1) + 1;
  parallel_for(num_threads, num_groups(), grain_, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) tries_[g].build(rows, std::move(members[g]));
  });
  for (const GroupTrie& trie : tries_) num_nodes_ += trie.num_nodes();
}

void PrefixTree::write(const TreeRows& rows, const TreeArrays& out, int num_threads) const {
  std::vector<int64_t> nodes(num_groups() + 1, 0);
  for (int64_t g = 0; g < num_groups(); ++g) {
    nodes[g + 1] = nodes[g] + tries_[g].num_nodes();
    out.group_starts[g] = static_cast<int32_t>(nodes[g]);
  }
  out.group_starts[num_groups()] = static_cast<int32_t>(num_nodes_);
  parallel_for(num_threads, num_groups(), grain_, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) tries_[g].write(rows, nodes[g], out);
  });
}

}  // namespace skyrl_fast
