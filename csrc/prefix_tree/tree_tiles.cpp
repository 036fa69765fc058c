// Attention of a tile of queries to its blocks of keys, and its gradient. Compiled once per SIMD
// level.
//
// The forward pass is that of FlashAttention (Dao et al. 2022, arXiv:2205.14135): scores of a few
// blocks at a time, sums rescaled when a larger score is found; the backward pass computes the
// scores again. All exponentials are powers of two.
#include "prefix_tree/tree_tiles.h"

#include <math.h>

#include <type_traits>

#include "core/simd_vectors.h"

namespace skyrl_fast {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kUnseen = -1e30f;  // finite: a row may see nothing of its first blocks
constexpr int64_t kRows = 4;       // rows of a matrix that are multiplied at once
constexpr int64_t kColumns = kLanes == 16 ? 4 : 2;  // vectors of columns, likewise
constexpr int64_t kVectorsPerBlock = kKeyBlock / kLanes;

SKYRL_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

int64_t padded_rows(int64_t num_queries) { return (num_queries + kRows - 1) / kRows * kRows; }

// Calls run with the largest of 4, 2, 1 vectors that is left, until all are done.
template <typename Run>
SKYRL_INLINE void for_columns(int64_t num_vectors, const Run& run) {
  int64_t at = 0;
  for (; at + kColumns <= num_vectors; at += kColumns) {
    run(at, std::integral_constant<int64_t, kColumns>());
  }
  for (; at < num_vectors; ++at) run(at, std::integral_constant<int64_t, 1>());
}

// out (rows, blocks * kKeyBlock) = a (rows, D) times the blocks' transposed nodes.
SKYRL_INLINE void multiply_transposed(const float* a, int64_t stride, int64_t num_rows,
                                      int64_t size, const float* transposed, const KeyBlock* blocks,
                                      int64_t num_blocks, float* out) {
  for_columns(num_blocks * kVectorsPerBlock, [&](int64_t vector, auto count) {
    constexpr int64_t kCount = decltype(count)::value;
    const float* b[kCount];
    for (int64_t c = 0; c < kCount; ++c) {
      const int64_t block = (vector + c) / kVectorsPerBlock;
      const int64_t lane = (vector + c) % kVectorsPerBlock * kLanes;
      b[c] = transposed + blocks[block].number * kKeyBlock * size + lane;
    }
    for (int64_t row = 0; row < num_rows; row += kRows) {
      Vec sums[kRows][kCount];
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < kCount; ++c) sums[r][c] = set1(0.0f);
      }
      const float* left = a + row * stride;
      for (int64_t d = 0; d < size; ++d) {
        Vec right[kCount];
        for (int64_t c = 0; c < kCount; ++c) right[c] = load(b[c] + d * kKeyBlock);
        for (int64_t r = 0; r < kRows; ++r) {
          const Vec factor = set1(left[r * stride + d]);
          for (int64_t c = 0; c < kCount; ++c) sums[r][c] = fma(factor, right[c], sums[r][c]);
        }
      }
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < kCount; ++c) {
          store_lanes(out + (row + r) * kKeysAtOnce + (vector + c) * kLanes, sums[r][c]);
        }
      }
    }
  });
}

// out (rows, P) += a (rows, blocks * kKeyBlock) times the blocks' rows.
SKYRL_INLINE void add_product(const float* a, int64_t num_rows, int64_t padded, const float* rows,
                              const KeyBlock* blocks, int64_t num_blocks, float* out) {
  for_columns(padded / kLanes, [&](int64_t vector, auto count) {
    constexpr int64_t kCount = decltype(count)::value;
    for (int64_t row = 0; row < num_rows; row += kRows) {
      float* target = out + row * padded + vector * kLanes;
      Vec sums[kRows][kCount];
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < kCount; ++c) sums[r][c] = load(target + r * padded + c * kLanes);
      }
      const float* left = a + row * kKeysAtOnce;
      for (int64_t block = 0; block < num_blocks; ++block, left += kKeyBlock) {
        const float* b = rows + blocks[block].number * kKeyBlock * padded + vector * kLanes;
        for (int64_t k = 0; k < kKeyBlock; ++k, b += padded) {
          Vec right[kCount];
          for (int64_t c = 0; c < kCount; ++c) right[c] = load(b + c * kLanes);
          for (int64_t r = 0; r < kRows; ++r) {
            const Vec factor = set1(left[r * kKeysAtOnce + k]);
            for (int64_t c = 0; c < kCount; ++c) sums[r][c] = fma(factor, right[c], sums[r][c]);
          }
        }
      }
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < kCount; ++c) {
          store_lanes(target + r * padded + c * kLanes, sums[r][c]);
        }
      }
    }
  });
}

// The blocks' rows of `out` (nodes, P) += a (rows, blocks * kKeyBlock), transposed, times b.
SKYRL_INLINE void add_transposed_product(const float* a, int64_t num_rows, int64_t padded,
                                         const float* b, const KeyBlock* blocks, int64_t num_blocks,
                                         float* out) {
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int64_t k = 0; k < kKeyBlock; k += kRows) {
      float* targets = out + (blocks[block].number * kKeyBlock + k) * padded;
      const float* left = a + block * kKeyBlock + k;
      for_columns(padded / kLanes, [&](int64_t vector, auto count) {
        constexpr int64_t kCount = decltype(count)::value;
        float* target = targets + vector * kLanes;
        Vec sums[kRows][kCount];
        for (int64_t i = 0; i < kRows; ++i) {
          for (int64_t c = 0; c < kCount; ++c) sums[i][c] = load(target + i * padded + c * kLanes);
        }
        for (int64_t r = 0; r < num_rows; ++r) {
          Vec right[kCount];
          for (int64_t c = 0; c < kCount; ++c) {
            right[c] = load(b + r * padded + (vector + c) * kLanes);
          }
          for (int64_t i = 0; i < kRows; ++i) {
            const Vec factor = set1(left[r * kKeysAtOnce + i]);
            for (int64_t c = 0; c < kCount; ++c) sums[i][c] = fma(factor, right[c], sums[i][c]);
          }
        }
        for (int64_t i = 0; i < kRows; ++i) {
          for (int64_t c = 0; c < kCount; ++c) {
            store_lanes(target + i * padded + c * kLanes, sums[i][c]);
          }
        }
      });
    }
  }
}

// Writes the tile's rows times `factor`, padded with zeros to (kRows * n, P).
SKYRL_INLINE void copy_rows(QueryRows rows, int64_t num_rows, const HeadShape& shape, float factor,
                            float* out) {
  for (int64_t r = 0; r < padded_rows(num_rows); ++r) {
    const int64_t size = r < num_rows ? shape.size : 0;
    for (int64_t d = 0; d < size; ++d)
      out[r * shape.padded + d] = factor * rows.data[r * rows.stride + d];
    for (int64_t d = size; d < shape.padded; ++d) out[r * shape.padded + d] = 0.0f;
  }
}

// Sets the scores of pairs that do not see each other to `value`.
SKYRL_INLINE void mask_scores(const Tile& tile, const NodeLimits& limits, const KeyBlock* blocks,
                              int64_t num_blocks, float value, float* scores) {
  const int32_t *ends = limits.ends, *depths = limits.depths;
  for (int64_t block = 0; block < num_blocks; ++block) {
    if (!blocks[block].masked) continue;
    const int32_t key = blocks[block].number * static_cast<int32_t>(kKeyBlock);
    for (int64_t r = 0; r < tile.num_queries; ++r) {
      float* score = scores + r * kKeysAtOnce + block * kKeyBlock;
      const int32_t query = static_cast<int32_t>(tile.first + r);
      const int32_t least = limits.least_depths == nullptr ? 0 : limits.least_depths[query];
      for (int32_t k = 0; k < kKeyBlock; ++k) {
        const bool seen = (key + k <= query) & (query < ends[key + k]) & (depths[key + k] >= least);
        score[k] = seen ? score[k] : value;
      }
    }
  }
}

// tanh(x) from 2^(-2 |x| log2 e) or, where that cancels, by Cephes' polynomial.
SKYRL_INLINE float tanh_from(float x, float power) {
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float small = p * z * x + x;
  const float large = copysignf((1.0f - power) / (1.0f + power), x);
  return z < 0.39f ? small : large;  // 0.625^2
}

// Replaces the scores by cap * tanh(score / cap).
SKYRL_INLINE void cap_scores(float* scores, int64_t count, float cap) {
  float powers[kKeysAtOnce];
  const float factor = 1.0f / cap;
  const Vec to_power = set1(-2.0f * kLog2E * factor), opposite = set1(-1.0f);
  for (int64_t k = 0; k < count; k += kLanes) {
    const Vec score = load(scores + k);
    const Vec size = max(score, mul(score, opposite));
    store_lanes(powers + k, exp2_or_zero<5>(mul(size, to_power)));
  }
  for (int64_t k = 0; k < count; ++k) scores[k] = cap * tanh_from(factor * scores[k], powers[k]);
}

SKYRL_INLINE void cap_rows(const HeadShape& shape, int64_t num_rows, int64_t num_blocks,
                           float* scores) {
  if (shape.softcap <= 0) return;
  for (int64_t r = 0; r < num_rows; ++r) {
    cap_scores(scores + r * kKeysAtOnce, num_blocks * kKeyBlock, kLog2E * shape.softcap);
  }
}

// Multiplies gradients of capped scores by 1 - tanh^2. What is masked lies below -cap.
SKYRL_INLINE void add_cap_gradient(const float* scores, int64_t count, float cap, float* grads) {
  const float factor = 1.0f / cap;
  for (int64_t k = 0; k < count; ++k) {
    const float t = factor * (scores[k] < -cap ? -cap : scores[k]);
    grads[k] *= 1.0f - t * t;
  }
}

SKYRL_INLINE float largest(const float* scores, int64_t count, float least) {
  Vec most = set1(least);
  for (int64_t k = 0; k < count; k += kLanes) most = max(load(scores + k), most);
  float lanes[kLanes];
  store_lanes(lanes, most);
  float found = lanes[0];
  for (int i = 1; i < kLanes; ++i) found = lanes[i] > found ? lanes[i] : found;
  return found;
}

// Replaces the scores by 2^(score - origin); returns their sum.
SKYRL_INLINE float exponentials(float* scores, int64_t count, float origin) {
  Vec sum = set1(0.0f);
  const Vec shift = set1(-origin);
  for (int64_t k = 0; k < count; k += kLanes) {
    const Vec e = exp2_or_zero<5>(add(load(scores + k), shift));
    store_lanes(scores + k, e);
    sum = add(sum, e);
  }
  return static_cast<float>(sum_lanes(sum));
}

void forward(const Tile& tile, const HeadShape& shape, const NodeLimits& limits, QueryRows query,
             const PackedHead& key, const PackedHead& value, const float* sink,
             const TileMemory& memory, OutRows out, float* lse) {
  const int64_t padded = shape.padded, rows = padded_rows(tile.num_queries);
  copy_rows(query, tile.num_queries, shape, shape.scale * kLog2E, memory.queries);
  memset(memory.outs, 0, sizeof(float) * rows * padded);
  float origin[kTileQueries], sums[kTileQueries];
  for (float& one : origin) one = sink == nullptr ? -INFINITY : kLog2E * *sink;
  for (float& one : sums) one = sink == nullptr ? 0.0f : 1.0f;
  for (int64_t done = 0; done < tile.num_blocks; done += kBlocksAtOnce) {
    const int64_t left = tile.num_blocks - done,
                  count = left < kBlocksAtOnce ? left : kBlocksAtOnce;
    const KeyBlock* blocks = tile.blocks + done;
    multiply_transposed(memory.queries, padded, rows, shape.size, key.transposed, blocks, count,
                        memory.scores);
    cap_rows(shape, rows, count, memory.scores);
    mask_scores(tile, limits, blocks, count, kUnseen, memory.scores);
    for (int64_t r = 0; r < rows; ++r) {
      float* scores = memory.scores + r * kKeysAtOnce;
      const float most = largest(scores, count * kKeyBlock, origin[r]);
      if (most > origin[r]) {
        const float factor = exp2f(origin[r] - most);
        sums[r] *= factor;
        float* sum = memory.outs + r * padded;
        for (int64_t d = 0; d < padded; ++d) sum[d] *= factor;
        origin[r] = most;
      }
      sums[r] += exponentials(scores, count * kKeyBlock, origin[r]);
    }
    add_product(memory.scores, rows, padded, value.rows, blocks, count, memory.outs);
  }
  for (int64_t r = 0; r < tile.num_queries; ++r) {
    const float factor = 1.0f / sums[r];
    for (int64_t d = 0; d < shape.size; ++d) {
      out.data[r * out.stride + d] = factor * memory.outs[r * padded + d];
    }
    lse[r] = origin[r] + log2f(sums[r]);
  }
}

void backward(const Tile& tile, const HeadShape& shape, const NodeLimits& limits, QueryRows query,
              const PackedHead& key, const PackedHead& value, QueryRows out, QueryRows grad,
              const float* lse, const TileMemory& memory, OutRows query_grad, float* key_grad,
              float* value_grad) {
  const int64_t padded = shape.padded, rows = padded_rows(tile.num_queries);
  float* queries = memory.queries;
  copy_rows(query, tile.num_queries, shape, shape.scale * kLog2E, queries);
  copy_rows(grad, tile.num_queries, shape, 1.0f, memory.grads);
  memset(memory.outs, 0, sizeof(float) * rows * padded);  // gradient of the queries
  float inner[kTileQueries] = {}, origin[kTileQueries] = {};
  for (int64_t r = 0; r < tile.num_queries; ++r) {
    float sum = 0.0f;
    for (int64_t d = 0; d < shape.size; ++d) {
      sum += memory.grads[r * padded + d] * out.data[r * out.stride + d];
    }
    inner[r] = sum;
    origin[r] = lse[r];
  }
  for (int64_t done = 0; done < tile.num_blocks; done += kBlocksAtOnce) {
    const int64_t left = tile.num_blocks - done,
                  count = left < kBlocksAtOnce ? left : kBlocksAtOnce;
    const KeyBlock* blocks = tile.blocks + done;
    multiply_transposed(queries, padded, rows, shape.size, key.transposed, blocks, count,
                        memory.scores);
    cap_rows(shape, rows, count, memory.scores);
    mask_scores(tile, limits, blocks, count, kUnseen, memory.scores);
    multiply_transposed(memory.grads, padded, rows, shape.size, value.transposed, blocks, count,
                        memory.score_grads);
    for (int64_t r = 0; r < rows; ++r) {
      float* scores = memory.scores + r * kKeysAtOnce;
      float* grads = memory.score_grads + r * kKeysAtOnce;
      const Vec shift = set1(-inner[r]);
      for (int64_t k = 0; k < count * kKeyBlock; k += kLanes) {
        store_lanes(grads + k, add(load(grads + k), shift));
      }
      if (shape.softcap > 0) {
        add_cap_gradient(scores, count * kKeyBlock, kLog2E * shape.softcap, grads);
      }
      exponentials(scores, count * kKeyBlock, origin[r]);
      for (int64_t k = 0; k < count * kKeyBlock; k += kLanes) {
        store_lanes(grads + k, mul(load(scores + k), load(grads + k)));
      }
    }
    add_transposed_product(memory.scores, rows, padded, memory.grads, blocks, count, value_grad);
    add_transposed_product(memory.score_grads, rows, padded, queries, blocks, count, key_grad);
    add_product(memory.score_grads, rows, padded, key.rows, blocks, count, memory.outs);
  }
  for (int64_t r = 0; r < tile.num_queries; ++r) {
    for (int64_t d = 0; d < shape.size; ++d) {
      query_grad.data[r * query_grad.stride + d] = shape.scale * memory.outs[r * padded + d];
    }
  }
}

constexpr TileKernels kKernels = {forward, backward};

}  // namespace

#if defined(SKYRL_SIMD_AVX512)
const TileKernels& tree_tiles_avx512() { return kKernels; }
#elif defined(SKYRL_SIMD_AVX2)
const TileKernels& tree_tiles_avx2() { return kKernels; }
#else
const TileKernels& tree_tiles_baseline() { return kKernels; }
#endif

}  // namespace skyrl_fast
