// Attention on prefix trees on the CPU: each node attends to itself and the nodes above it, or to
// the nearest of these.
// T nodes in depth-first order, H heads of queries, G of keys and values, D head size.
#pragma once

#include <cstdint>
#include <vector>

#include "prefix_tree/tree_tiles.h"

namespace skyrl_fast {

// How far up its path a node sees; 0: no limit. A node's depth is its token's position in a row.
struct Reach {
  int64_t window = 0;  // the nodes at a distance below this
  int64_t chunk = 0;   // the nodes whose depth divided by this is the same

  // The least depth that a node sees.
  int64_t least_depth(int64_t depth) const {
    const int64_t by_window = window > 0 ? depth - window + 1 : 0;
    const int64_t by_chunk = chunk > 0 ? depth - depth % chunk : 0;
    return by_window > by_chunk ? by_window : by_chunk;
  }
};

// Which blocks of nodes each tile of queries attends to. The work of a tile is proportional to its
// blocks, so it ends early where the next branch would leave many of them behind.
class TreeTiles {
 public:
  // parents, ends: (T,) as in TreeArrays. Throws invalid_argument if they are not those of trees in
  // depth-first order.
  TreeTiles(const int32_t* parents, const int32_t* ends, int64_t num_nodes, const Reach& reach);

  int64_t num_nodes() const { return num_nodes_; }
  int64_t num_tiles() const { return static_cast<int64_t>(tile_starts_.size()) - 1; }
  Tile tile(int64_t number) const;
  NodeLimits limits() const {
    return {ends_.data(), depths_.data(), least_depths_.empty() ? nullptr : least_depths_.data()};
  }
  int64_t num_blocks() const { return static_cast<int64_t>(ends_.size()) / kKeyBlock; }

 private:
  int64_t tile_end(const int32_t* parents, int64_t first) const;
  void add_blocks(const int32_t* parents, const std::vector<int32_t>& run_starts, int64_t first,
                  int64_t end);

  int64_t num_nodes_;
  std::vector<int32_t> ends_, depths_;  // padded with 0 to full blocks
  std::vector<int32_t> least_depths_;   // (T,) that the node sees; empty without a limit
  std::vector<int32_t> tile_starts_;    // (tiles + 1,)
  std::vector<int64_t> block_offsets_;  // (tiles + 1,)
  std::vector<KeyBlock> blocks_;
};

// (heads, T, D) float32; D floats of a row are consecutive. Strides in floats.
template <typename Float>
struct Heads {
  Float* data;
  int64_t head_stride, row_stride;
};

struct AttentionShape {
  int64_t num_heads;     // H
  int64_t num_kv_heads;  // G divides H; consecutive query heads share one
  int64_t head_size;     // D
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0: they stay
};

// sinks: (H,) a score per head that takes part in the softmax and has no value; null: none.
// lse: (H, T), log2 of the sums of 2^(score log2 e), that of the sink included.
void tree_attention(const TreeTiles& tiles, const AttentionShape& shape, Heads<const float> query,
                    Heads<const float> key, Heads<const float> value, const float* sinks,
                    Heads<float> out, float* lse, int num_threads);

struct AttentionGrads {
  Heads<float> query, key, value;
};

// The gradients of query, key and value for `grad`, that of `out`. Results may depend on
// num_threads by rounding, where there are more threads than heads of keys.
void tree_attention_backward(const TreeTiles& tiles, const AttentionShape& shape,
                             Heads<const float> query, Heads<const float> key,
                             Heads<const float> value, Heads<const float> out, const float* lse,
                             Heads<const float> grad, const AttentionGrads& grads, int num_threads);

}  // namespace skyrl_fast
