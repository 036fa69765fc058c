// Attention on prefix trees on the CPU: each node attends to itself and the nodes above it.
// T nodes in depth-first order, H heads of queries, G of keys and values, D head size.
#pragma once

#include <cstdint>
#include <vector>

#include "prefix_tree/tree_tiles.h"

namespace skyrl_fast {

// Which blocks of nodes each tile of queries attends to. The work of a tile is proportional to its
// blocks, so it ends early where the next branch would leave many of them behind.
class TreeTiles {
 public:
  // parents, ends: (T,) as in TreeArrays. Throws invalid_argument if they are not those of trees in
  // depth-first order.
  TreeTiles(const int32_t* parents, const int32_t* ends, int64_t num_nodes);

  int64_t num_nodes() const { return num_nodes_; }
  int64_t num_tiles() const { return static_cast<int64_t>(tile_starts_.size()) - 1; }
  Tile tile(int64_t number) const;
  const int32_t* ends() const { return ends_.data(); }  // padded with 0 to full blocks
  int64_t num_blocks() const { return static_cast<int64_t>(ends_.size()) / kKeyBlock; }

 private:
  int64_t tile_end(const int32_t* parents, int64_t first) const;
  void add_blocks(const int32_t* parents, const std::vector<int32_t>& run_starts, int64_t first,
                  int64_t end);

  int64_t num_nodes_;
  std::vector<int32_t> ends_;
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
};

// lse: (H, T), log2 of the sums of 2^(score log2 e).
void tree_attention(const TreeTiles& tiles, const AttentionShape& shape, Heads<const float> query,
                    Heads<const float> key, Heads<const float> value, Heads<float> out, float* lse,
                    int num_threads);

struct AttentionGrads {
  Heads<float> query, key, value;
};

// The gradients of all three inputs for `grad`, that of `out`. Results may depend on num_threads by
// rounding, where there are more threads than heads of keys.
void tree_attention_backward(const TreeTiles& tiles, const AttentionShape& shape,
                             Heads<const float> query, Heads<const float> key,
                             Heads<const float> value, Heads<const float> out, const float* lse,
                             Heads<const float> grad, const AttentionGrads& grads, int num_threads);

}  // namespace skyrl_fast
