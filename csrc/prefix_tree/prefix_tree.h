// Rows with common prefixes as trees: one node for each distinct prefix, in depth-first order.
// N rows, G groups, T nodes.
#pragma once

#include <cstdint>
#include <vector>

namespace skyrl_fast {

// Row r is tokens[starts[r]:][:lengths[r]]. Two tokens are the same where their ids are and, with
// labels, their label cells: token j of row r has cell label_starts[r] + j, `label_bytes` wide, if
// j < label_counts[r], else none, which equals only none.
struct TreeRows {
  int64_t num_rows = 0;
  const int32_t* tokens = nullptr;
  const int64_t* starts = nullptr;
  const int64_t* lengths = nullptr;
  const uint8_t* labels = nullptr;
  const int64_t* label_starts = nullptr;
  const int64_t* label_counts = nullptr;
  int64_t label_bytes = 0;

  // The number of equal tokens of rows a and b from `depth` on, at most n.
  int64_t common(int64_t a, int64_t b, int64_t depth, int64_t n) const;
  uint64_t hash_at(int64_t row, int64_t depth) const;
};

// The arrays of a tree, allocated by the caller. Nodes are numbered depth first, children
// in the order of the first row through them, trees in the order of their groups.
struct TreeArrays {
  int32_t* tokens;        // (T,)
  int32_t* parents;       // (T,) -1 at a root
  int32_t* positions;     // (T,) depth, from 0
  int32_t* ends;          // (T,) one past the last node below; the node itself is the begin
  int64_t* sources;       // (T,) index of the node's token in the rows' tokens
  int32_t* group_starts;  // (G + 1,) first node of each group's tree
  int32_t* row_nodes;     // node of each row's tokens, at row_node_starts[r]; only [:lengths[r]]
  const int64_t* row_node_starts;  // (N,)
};

// One group's compressed trie.
class GroupTrie {
 public:
  // `rows`: the group's rows, in order.
  void build(const TreeRows& all, std::vector<int64_t> rows);

  int64_t num_nodes() const { return num_nodes_; }
  // Writes the group's part, from node number `first_node` on.
  void write(const TreeRows& all, int64_t first_node, const TreeArrays& out) const;
  // The rows, as indices into those of `build`, by the nodes of their last tokens; and how many
  // nodes each shares with the row before it.
  void sort_rows(const TreeRows& all, std::vector<int64_t>* order,
                 std::vector<int64_t>* shared) const;

 private:
  friend class CoveredNodes;
  // A run of nodes without a fork: tokens [begin, end) of `row`, a row through it.
  struct Segment {
    int64_t row, begin, end;
    int32_t parent;
    int32_t first_child = -1, last_child = -1, next_sibling = -1;
  };
  struct Place {  // in depth-first order
    int64_t first_node, end;
  };

  int32_t find_child(const TreeRows& all, int32_t parent, int64_t row, int64_t depth,
                     uint64_t* slot) const;
  void insert(const TreeRows& all, int64_t row, int32_t* end_segment);
  int32_t add_segment(const Segment& segment);
  int32_t split(const TreeRows& all, int32_t segment, int64_t depth, uint64_t slot);
  void order_children(const std::vector<int32_t>& row_segments);
  std::vector<int32_t> depth_first() const;
  // Of the segments in the order of `depth_first`.
  std::vector<Place> number_nodes(const std::vector<int32_t>& order, int64_t first_node) const;

  std::vector<int64_t> rows_;
  std::vector<int32_t> end_segments_;  // of each row
  std::vector<Segment> segments_;
  std::vector<int32_t> slots_;  // hash table of children by parent and first token; -1 is free
  int32_t first_root_ = -1, last_root_ = -1;
  int64_t num_nodes_ = 0;
};

// Counts the distinct nodes of rows of a trie that are added one by one.
class CoveredNodes {
 public:
  CoveredNodes(const GroupTrie& trie, const TreeRows& all)
      : trie_(trie), all_(all), until_(trie.segments_.size(), 0) {}

  int64_t size() const { return size_; }
  void add(int64_t index);  // of the row in those of `GroupTrie::build`
  void clear();

 private:
  const GroupTrie& trie_;
  const TreeRows& all_;
  std::vector<int64_t> until_;  // the depth up to which a segment is covered; 0: not at all
  std::vector<int32_t> covered_;
  int64_t size_ = 0;
};

// The tries of all groups, built by several threads. Groups are numbered by first appearance.
class PrefixTree {
 public:
  PrefixTree(const TreeRows& rows, const int64_t* group_ids, int num_threads);

  int64_t num_groups() const { return static_cast<int64_t>(tries_.size()); }
  int64_t num_nodes() const { return num_nodes_; }
  // `rows`: those that the tree was built from.
  void write(const TreeRows& rows, const TreeArrays& out, int num_threads) const;

 private:
  std::vector<GroupTrie> tries_;
  int64_t num_nodes_ = 0, grain_ = 1;
};

}  // namespace skyrl_fast
