// Tiles of tree attention: a few consecutive nodes as queries, and the blocks of nodes that they
// attend to. Internal to tree_attention_cpu.cpp; the kernels are compiled once per SIMD level.
//
// A node j is seen by node i if j <= i < ends[j]: by itself, and by the nodes below it; where a
// node's sight is limited, if also depths[j] >= least_depths[i].
#pragma once

#include <stdint.h>

namespace skyrl_fast {

constexpr int64_t kTileQueries = 32;
constexpr int64_t kKeyBlock = 16;      // nodes
constexpr int64_t kBlocksAtOnce = 16;  // key blocks whose scores are in memory together
constexpr int64_t kKeysAtOnce = kKeyBlock * kBlocksAtOnce;

// A block of keys: nodes [number * kKeyBlock, ...), of which a query may see all or some.
struct KeyBlock {
  int32_t number;
  bool masked;
};

struct NodeLimits {
  const int32_t* ends;          // padded with 0 to full blocks
  const int32_t* depths;        // likewise
  const int32_t* least_depths;  // null: no limit
};

// D is the head size, P the same rounded up to kKeyBlock. Packed operands of one head: `transposed`
// has a matrix (D, kKeyBlock) per block of nodes, `rows` is (nodes, P) with zeros behind D.
struct PackedHead {
  const float* transposed;
  const float* rows;
};

struct Tile {
  int64_t first;  // its first query
  int64_t num_queries;
  const KeyBlock* blocks;  // ascending; those of the queries themselves are last
  int64_t num_blocks;
};

struct HeadShape {
  int64_t size;    // D
  int64_t padded;  // P
  float scale;     // of the scores
  float softcap;   // of the scaled scores; 0: none
};

// Scratch memory of one thread, in floats.
struct TileMemory {
  float* queries;      // (kTileQueries, P)
  float* outs;         // (kTileQueries, P)
  float* grads;        // (kTileQueries, P)
  float* scores;       // (kTileQueries, kKeysAtOnce)
  float* score_grads;  // (kTileQueries, kKeysAtOnce)
  static int64_t floats(int64_t padded) {
    return 3 * kTileQueries * padded + 2 * kTileQueries * kKeysAtOnce;
  }
};

// Rows of a head, D consecutive floats each.
struct QueryRows {
  const float* data;  // of the tile's first query
  int64_t stride;
};
struct OutRows {
  float* data;
  int64_t stride;
};

struct TileKernels {
  // sink: the head's; null: none. lse: of the tile's queries, log2 of the sum of 2^(score log2 e).
  void (*forward)(const Tile& tile, const HeadShape& shape, const NodeLimits& limits,
                  QueryRows query, const PackedHead& key, const PackedHead& value,
                  const float* sink, const TileMemory& memory, OutRows out, float* lse);
  // Adds to key_grad and value_grad, (nodes, P); key_grad is still to be multiplied by log 2.
  void (*backward)(const Tile& tile, const HeadShape& shape, const NodeLimits& limits,
                   QueryRows query, const PackedHead& key, const PackedHead& value, QueryRows out,
                   QueryRows grad, const float* lse, const TileMemory& memory, OutRows query_grad,
                   float* key_grad, float* value_grad);
};

const TileKernels& tree_tiles_baseline();
const TileKernels& tree_tiles_avx2();
const TileKernels& tree_tiles_avx512();

}  // namespace skyrl_fast
