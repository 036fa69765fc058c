// Tree attention on the CPU: tiles of queries, operands packed once, threads over tiles and heads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "core/parallel.h"
#include "core/simd.h"
#include "prefix_tree/tree_attention.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kMostLeftBehind = 48;  // keys that only a tile's first queries see
constexpr double kLn2 = 0.6931471805599453;

const TileKernels& tile_kernels() { return SKYRL_OF_SIMD_LEVEL(tree_tiles); }

int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

std::unique_ptr<float[]> floats(int64_t count) {
  return std::unique_ptr<float[]>(new float[std::max<int64_t>(1, count)]);
}

template <typename Float>
Float* row_of(const Heads<Float>& heads, int64_t head, int64_t node) {
  return heads.data + head * heads.head_stride + node * heads.row_stride;
}

// Keys or values of all heads, as the kernels read them.
class Packed {
 public:
  Packed(const TreeTiles& tiles, const AttentionShape& shape, Heads<const float> heads,
         bool with_transposed, bool with_rows, int num_threads)
      : size_(shape.head_size), padded_(rounded_up(size_, kKeyBlock)) {
    const int64_t num_blocks = tiles.num_blocks(), num_nodes = tiles.num_nodes();
    transposed_stride_ = num_blocks * kKeyBlock * size_;
    rows_stride_ = num_blocks * kKeyBlock * padded_;
    if (with_transposed) transposed_ = floats(shape.num_kv_heads * transposed_stride_);
    if (with_rows) rows_ = floats(shape.num_kv_heads * rows_stride_);
    constexpr int64_t kGrain = 64;
    parallel_for(num_threads, shape.num_kv_heads * num_blocks, kGrain,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t at = begin; at < end; ++at) {
                     const int64_t head = at / num_blocks, block = at % num_blocks;
                     const int64_t first = block * kKeyBlock;
                     const int64_t count = std::min(kKeyBlock, num_nodes - first);
                     pack(heads, head, first, count);
                   }
                 });
  }

  PackedHead head(int64_t number) const {
    return {transposed_.get() + number * transposed_stride_, rows_.get() + number * rows_stride_};
  }

 private:
  void pack(Heads<const float> heads, int64_t head, int64_t first, int64_t count) const {
    for (int64_t k = 0; k < kKeyBlock; ++k) {
      const float* from = k < count ? row_of(heads, head, first + k) : nullptr;
      if (transposed_) {
        float* to = transposed_.get() + head * transposed_stride_ + first * size_ + k;
        for (int64_t d = 0; d < size_; ++d) to[d * kKeyBlock] = from != nullptr ? from[d] : 0.0f;
      }
      if (rows_) {
        float* to = rows_.get() + head * rows_stride_ + (first + k) * padded_;
        if (from != nullptr) std::memcpy(to, from, sizeof(float) * size_);
        std::fill(to + (from != nullptr ? size_ : 0), to + padded_, 0.0f);
      }
    }
  }

  int64_t size_, padded_, transposed_stride_, rows_stride_;
  std::unique_ptr<float[]> transposed_, rows_;
};

class Scratch {
 public:
  explicit Scratch(int64_t padded) : memory_(floats(TileMemory::floats(padded))) {
    float* at = memory_.get();
    const int64_t rows = kTileQueries * padded, scores = kTileQueries * kKeysAtOnce;
    tile_ = {at, at + rows, at + 2 * rows, at + 3 * rows, at + 3 * rows + scores};
  }
  const TileMemory& tile() const { return tile_; }

 private:
  std::unique_ptr<float[]> memory_;
  TileMemory tile_;
};

// Runs fn(item, scratch) for items [0, count), taken in order by the threads.
template <typename Fn>
void for_each_item(int64_t count, int num_threads, int64_t padded, const Fn& fn) {
  const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(num_threads, count));
  std::atomic<int64_t> next{0};
  parallel_for(static_cast<int>(threads), threads, 1, [&](int64_t begin, int64_t end) {
    const Scratch scratch(padded);
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        fn(item, scratch.tile());
      }
    }
  });
}

HeadShape head_shape(const AttentionShape& shape) {
  return {shape.head_size, rounded_up(shape.head_size, kKeyBlock), shape.scale, shape.softcap};
}

// The first tiles of equal shares of the work.
std::vector<int64_t> shares_of_tiles(const TreeTiles& tiles, int64_t num_shares) {
  const int64_t count = tiles.num_tiles();
  std::vector<int64_t> work(count + 1, 0), starts{0};
  for (int64_t t = 0; t < count; ++t) {
    const Tile tile = tiles.tile(t);
    work[t + 1] = work[t] + tile.num_queries * tile.num_blocks;
  }
  for (int64_t share = 1; share < num_shares; ++share) {
    const int64_t wanted = work[count] * share / num_shares;
    starts.push_back(std::lower_bound(work.begin(), work.end(), wanted) - work.begin());
  }
  starts.push_back(count);
  return starts;
}

[[noreturn]] void fail_at(int64_t node, const std::string& wanted, int64_t got) {
  throw std::invalid_argument(
      "tree_attention: parents and ends: expected trees in depth-first "
      "order, wanted " +
      wanted + " at node " + std::to_string(node) + ", got " + std::to_string(got));
}

void check_tree(const int32_t* parents, const int32_t* ends, int64_t num_nodes) {
  for (int64_t node = 0; node < num_nodes; ++node) {
    const int64_t parent = parents[node];
    if (parent < -1 || parent >= node) fail_at(node, "a parent before it, or -1", parent);
    const int64_t most = parent < 0 ? num_nodes : ends[parent];
    if (ends[node] <= node || ends[node] > most) {
      fail_at(node, "an end after it and at most " + std::to_string(most), ends[node]);
    }
    // What begins here continues the node before it, or follows a subtree that ends here.
    if (node > 0 && parent != node - 1 && ends[node - 1] != node) {
      fail_at(node, "parent " + std::to_string(node - 1), parent);
    }
  }
}

}  // namespace

TreeTiles::TreeTiles(const int32_t* parents, const int32_t* ends, int64_t num_nodes,
                     const Reach& reach)
    : num_nodes_(num_nodes), ends_(rounded_up(num_nodes, kKeyBlock), 0), depths_(ends_.size(), 0) {
  check_tree(parents, ends, num_nodes);
  std::copy(ends, ends + num_nodes, ends_.begin());
  for (int64_t node = 0; node < num_nodes; ++node) {
    depths_[node] = parents[node] < 0 ? 0 : depths_[parents[node]] + 1;
  }
  const int32_t deepest = num_nodes > 0 ? *std::max_element(depths_.begin(), depths_.end()) : 0;
  if (reach.least_depth(deepest) > 0) {  // else nothing is out of reach
    least_depths_.resize(num_nodes);
    for (int64_t node = 0; node < num_nodes; ++node) {
      least_depths_[node] =
          static_cast<int32_t>(std::max<int64_t>(0, reach.least_depth(depths_[node])));
    }
  }
  std::vector<int32_t> run_starts(num_nodes);  // of the run of parents that are the node before
  for (int64_t node = 0; node < num_nodes; ++node) {
    const bool continues = node > 0 && parents[node] == node - 1;
    run_starts[node] = continues ? run_starts[node - 1] : static_cast<int32_t>(node);
  }
  tile_starts_.push_back(0);
  block_offsets_.push_back(0);
  for (int64_t first = 0; first < num_nodes;) {
    const int64_t end = tile_end(parents, first);
    add_blocks(parents, run_starts, first, end);
    tile_starts_.push_back(static_cast<int32_t>(end));
    block_offsets_.push_back(static_cast<int64_t>(blocks_.size()));
    first = end;
  }
}

int64_t TreeTiles::tile_end(const int32_t* parents, int64_t first) const {
  const int64_t most = std::min(first + kTileQueries, num_nodes_);
  int64_t above = parents[first], left_behind = 0;
  for (int64_t node = first + 1; node < most; ++node) {
    while (above >= 0 && ends_[above] <= node) {
      if (++left_behind > kMostLeftBehind) return node;
      above = parents[above];
    }
  }
  return most;
}

void TreeTiles::add_blocks(const int32_t* parents, const std::vector<int32_t>& run_starts,
                           int64_t first, int64_t end) {
  const size_t begin = blocks_.size();
  int64_t lowest = end;         // the first node of the blocks so far
  int64_t least = 0, most = 0;  // least depths that a query, and that all queries see
  if (!least_depths_.empty()) {
    const auto range =
        std::minmax_element(least_depths_.begin() + first, least_depths_.begin() + end);
    least = *range.first;
    most = *range.second;
  }
  const auto add = [&](int64_t start, int64_t stop, bool own) {
    for (int64_t block = (std::min(stop, lowest) - 1) / kKeyBlock;
         block * kKeyBlock + kKeyBlock > start; --block) {
      if (block < 0) break;
      const int64_t last = block * kKeyBlock + kKeyBlock - 1;
      // Ends only shrink along a path, so the last node's is the smallest.
      const bool seen_by_all = !own && block * kKeyBlock >= start && last < stop &&
                               ends_[last] >= end && depths_[block * kKeyBlock] >= most;
      blocks_.push_back({static_cast<int32_t>(block), !seen_by_all});
      lowest = block * kKeyBlock;
    }
  };
  add(first, end, true);
  for (int64_t node = parents[first]; node >= 0 && depths_[node] >= least;
       node = parents[run_starts[node]]) {
    // Depths of a run are consecutive.
    const int64_t start = std::max<int64_t>(run_starts[node], node - (depths_[node] - least));
    if (start < lowest) add(start, node + 1, false);
  }
  std::reverse(blocks_.begin() + static_cast<int64_t>(begin), blocks_.end());
}

Tile TreeTiles::tile(int64_t number) const {
  const int64_t first = tile_starts_[number], offset = block_offsets_[number];
  return {first, tile_starts_[number + 1] - first, blocks_.data() + offset,
          block_offsets_[number + 1] - offset};
}

void tree_attention(const TreeTiles& tiles, const AttentionShape& shape, Heads<const float> query,
                    Heads<const float> key, Heads<const float> value, const float* sinks,
                    Heads<float> out, float* lse, int num_threads) {
  const NodeLimits limits = tiles.limits();
  const HeadShape head = head_shape(shape);
  const Packed keys(tiles, shape, key, true, false, num_threads);
  const Packed values(tiles, shape, value, false, true, num_threads);
  const TileKernels& kernels = tile_kernels();
  const int64_t queries_per_key = shape.num_heads / shape.num_kv_heads;
  const int64_t count = tiles.num_tiles() * shape.num_heads;
  for_each_item(count, num_threads, head.padded, [&](int64_t item, const TileMemory& memory) {
    const int64_t h = item % shape.num_heads, g = h / queries_per_key;
    const Tile tile = tiles.tile(tiles.num_tiles() - 1 - item / shape.num_heads);
    kernels.forward(tile, head, limits, {row_of(query, h, tile.first), query.row_stride},
                    keys.head(g), values.head(g), sinks == nullptr ? nullptr : sinks + h, memory,
                    {row_of(out, h, tile.first), out.row_stride},
                    lse + h * tiles.num_nodes() + tile.first);
  });
}

void tree_attention_backward(const TreeTiles& tiles, const AttentionShape& shape,
                             Heads<const float> query, Heads<const float> key,
                             Heads<const float> value, Heads<const float> out, const float* lse,
                             Heads<const float> grad, const AttentionGrads& grads,
                             int num_threads) {
  const NodeLimits limits = tiles.limits();
  const HeadShape head = head_shape(shape);
  const Packed keys(tiles, shape, key, true, true, num_threads);
  const Packed values(tiles, shape, value, true, false, num_threads);
  const TileKernels& kernels = tile_kernels();
  const int64_t queries_per_key = shape.num_heads / shape.num_kv_heads;
  // Tiles add to the same keys, so each share of them has sums of its own.
  const int64_t num_shares = std::max<int64_t>(
      1, std::min((num_threads + shape.num_kv_heads - 1) / shape.num_kv_heads, tiles.num_tiles()));
  const std::vector<int64_t> shares = shares_of_tiles(tiles, num_shares);
  const int64_t sums_size = tiles.num_blocks() * kKeyBlock * head.padded;
  std::vector<std::unique_ptr<float[]>> key_sums(num_shares * shape.num_kv_heads);
  std::vector<std::unique_ptr<float[]>> value_sums(num_shares * shape.num_kv_heads);
  const int64_t count = num_shares * shape.num_kv_heads;
  for_each_item(count, num_threads, head.padded, [&](int64_t item, const TileMemory& memory) {
    const int64_t g = item % shape.num_kv_heads, share = item / shape.num_kv_heads;
    for (auto* sums : {&key_sums[item], &value_sums[item]}) {
      *sums = floats(sums_size);
      std::fill(sums->get(), sums->get() + sums_size, 0.0f);
    }
    for (int64_t t = shares[share]; t < shares[share + 1]; ++t) {
      const Tile tile = tiles.tile(t);
      for (int64_t h = g * queries_per_key; h < (g + 1) * queries_per_key; ++h) {
        kernels.backward(tile, head, limits, {row_of(query, h, tile.first), query.row_stride},
                         keys.head(g), values.head(g), {row_of(out, h, tile.first), out.row_stride},
                         {row_of(grad, h, tile.first), grad.row_stride},
                         lse + h * tiles.num_nodes() + tile.first, memory,
                         {row_of(grads.query, h, tile.first), grads.query.row_stride},
                         key_sums[item].get(), value_sums[item].get());
      }
    }
  });
  constexpr int64_t kGrain = 1024;
  parallel_for(num_threads, shape.num_kv_heads * tiles.num_nodes(), kGrain,
               [&](int64_t begin, int64_t end) {
                 for (int64_t at = begin; at < end; ++at) {
                   const int64_t g = at / tiles.num_nodes(), node = at % tiles.num_nodes();
                   float* key_grad = row_of(grads.key, g, node);
                   float* value_grad = row_of(grads.value, g, node);
                   for (int64_t d = 0; d < shape.head_size; ++d) {
                     float of_key = 0.0f, of_value = 0.0f;
                     for (int64_t share = 0; share < num_shares; ++share) {
                       const int64_t item = share * shape.num_kv_heads + g;
                       of_key += key_sums[item][node * head.padded + d];
                       of_value += value_sums[item][node * head.padded + d];
                     }
                     key_grad[d] = static_cast<float>(kLn2) * of_key;
                     value_grad[d] = of_value;
                   }
                 }
               });
}

}  // namespace skyrl_fast
