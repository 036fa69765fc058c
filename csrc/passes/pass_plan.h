// Forward passes of a batch: which rows share one, laid out as sequences or as prefix trees.
// N rows, S tokens, A response tokens, P passes.
#pragma once

#include <cstdint>
#include <vector>

namespace skyrl_fast {

// A batch. Row r is tokens[cu_tokens[r]:cu_tokens[r + 1]], a prompt and then the response, whose
// tokens are [cu_responses[r], cu_responses[r + 1]) in the arrays per response token.
struct PassRows {
  int64_t num_rows = 0;
  const int32_t* tokens = nullptr;
  const int64_t* cu_tokens = nullptr;
  const int64_t* cu_responses = nullptr;
  const uint8_t* trained = nullptr;         // (A,)
  const int64_t* group_ids = nullptr;       // (N,)
  const int64_t* trajectory_ids = nullptr;  // (N,) equal only for adjacent rows
  // Recorded routes to replay, or null: the first tokens of row r have the cells
  // [cu_routes[r], cu_routes[r + 1]), `route_bytes` wide.
  const uint8_t* routes = nullptr;
  const int64_t* cu_routes = nullptr;
  int64_t route_bytes = 0;

  int64_t length(int64_t row) const { return cu_tokens[row + 1] - cu_tokens[row]; }
  int64_t response(int64_t row) const { return cu_responses[row + 1] - cu_responses[row]; }
  int64_t prompt(int64_t row) const { return length(row) - response(row); }
  int64_t num_routes(int64_t row) const { return cu_routes[row + 1] - cu_routes[row]; }
};

// Seconds of a pass per token, per pair of tokens of which one attends to the other, and per
// segment of a tree: a chain of nodes that ends at a fork or a leaf.
struct LayoutCosts {
  double sequence_token, sequence_pair, tree_token, tree_pair, tree_segment;
};

struct PassOptions {
  int64_t token_budget = 0;            // most tokens of a pass, padding included
  bool keep_trajectories = false;      // a trajectory's rows share a pass
  bool tree = false;                   // rows may be laid out as trees
  const LayoutCosts* costs = nullptr;  // that decide for each group; null: all groups are trees
  // Rows of sequences share a pass only if they are longer than equally many of these.
  std::vector<int64_t> length_limits;
  int64_t longest_row = 0;  // of sequences, which must not be longer; 0: any
};

struct Pass {
  bool is_tree = false;
  int64_t width = 0;  // of the longest sequence, or the number of nodes
  int64_t num_trained = 0;
  std::vector<int64_t> rows;  // ascending
  // As sequences: the row that each sequence holds, and the sequence of each of `rows`, which holds
  // it or a later row that begins with it. As a tree: `rows` depth first, as indices, and the nodes
  // that each shares with the one before it.
  std::vector<int64_t> sequences, sequence_of_row;
  std::vector<int64_t> order, shared;

  int64_t num_sequences() const { return is_tree ? 1 : static_cast<int64_t>(sequences.size()); }
};

// All that a planned pass says of its n rows: with them it can be made again where only they are.
struct PassLayout {
  bool is_tree = false;
  int64_t num_rows = 0;
  const int64_t* rows = nullptr;    // ascending
  const int64_t* places = nullptr;  // as sequences `Pass::sequence_of_row`, as a tree `Pass::order`
  const int64_t* shared = nullptr;  // as a tree `Pass::shared`, else 0
};

// Linear in the tokens; holds a few numbers per row.
class PassPlan {
 public:
  // `visited`: (N,) the rows to plan for; those without a trained token are left out.
  PassPlan(const PassRows& rows, const uint8_t* visited, const PassOptions& options,
           int num_threads);
  // The passes of a plan for more rows, from their layouts.
  PassPlan(const PassRows& rows, const std::vector<PassLayout>& layouts, int num_threads);

  const std::vector<Pass>& passes() const { return passes_; }
  // Writes what makes a `PassLayout`: three arrays, each as long as the pass has rows.
  void write_layout(int64_t number, int64_t* rows, int64_t* places, int64_t* shared) const;
  // Tokens of a row up to its last trained one, whose logprob is read at the token before it.
  int64_t needed(int64_t row) const { return needed_[row]; }
  int64_t num_trained(int64_t row) const { return num_trained_[row]; }

 private:
  void count_trained(const PassRows& rows, const uint8_t* visited, int num_threads);
  void plan_trees(const PassRows& rows, const PassOptions& options, int num_threads);
  void plan_sequences(const PassRows& rows, const PassOptions& options, int num_threads);
  void add_rows(const std::vector<int64_t>& rows, Pass* pass) const;
  void lay_out_tree(const PassLayout& layout, Pass* pass) const;
  void lay_out_sequences(const PassRows& rows, const PassLayout& layout, Pass* pass) const;

  std::vector<int64_t> needed_, num_trained_;  // (N,) 0: not visited
  std::vector<uint8_t> as_sequence_;           // (N,)
  std::vector<Pass> passes_;
};

}  // namespace skyrl_fast
