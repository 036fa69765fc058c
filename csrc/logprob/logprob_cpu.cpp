// Selected log-probabilities on the CPU: rows are distributed over threads, one pass per row.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "core/element.h"
#include "core/parallel.h"
#include "core/simd.h"
#include "logprob/logprob.h"
#include "logprob/logprob_rows.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kElementsPerThread = 1 << 18;  // below this a thread costs more than it saves
constexpr int64_t kElementsPerTake = 1 << 16;    // per fetch of the shared row counter

const RowKernels& row_kernels(DType dtype) {
  const RowKernelSet& set = SKYRL_OF_SIMD_LEVEL(logprob_rows);
  if (dtype == DType::kBFloat16) return set.bfloat16;
  if (dtype == DType::kFloat16) return set.float16;
  return set.float32;
}

[[noreturn]] void fail_at(const Selection& selection, const std::string& wanted, int64_t got,
                          int64_t row) {
  throw std::invalid_argument(std::string(selection.op) + ": " + wanted +
                              " where the mask is 1, got " + std::to_string(got) + " in row " +
                              std::to_string(row));
}

[[noreturn]] void fail_at_target(const char* op, int64_t vocab, int64_t target, int64_t row) {
  Selection selection;
  selection.op = op;
  fail_at(selection, "target_ids: expected ids in [0, " + std::to_string(vocab) + ")", target, row);
}

void check_targets(const LogitRows& logits, const Selection& selection) {
  for (int64_t r = 0; r < logits.num_rows; ++r) {
    const int64_t target = selection.target_ids[r];
    if (selection.has(r) && (target < 0 || target >= logits.vocab)) {
      fail_at_target(selection.op, logits.vocab, target, r);
    }
  }
}

// Ids of ascending order are in range if the first and the last are.
void check_ids(const Selection& selection, const KeptIds& kept, int64_t vocab, int64_t row) {
  if (kept.size == 0) return;
  int32_t falls = 0;
  for (int64_t i = 1; i < kept.size; ++i) falls |= kept.ids[i - 1] >= kept.ids[i];
  if (falls != 0) {
    int64_t i = 1;
    while (kept.ids[i - 1] < kept.ids[i]) ++i;
    fail_at(selection,
            "kept_ids: expected one above " + std::to_string(kept.ids[i - 1]) +
                ", the id before (ascending, none twice)",
            kept.ids[i], row);
  }
  for (const int32_t id : {kept.ids[0], kept.ids[kept.size - 1]}) {
    if (id >= 0 && id < vocab) continue;
    fail_at(selection, "kept_ids: expected ids in [0, " + std::to_string(vocab) + ")", id, row);
  }
}

// Copies of a row's kept logits, of any dtype, next to each other.
using Gathered = std::vector<uint32_t>;

// The logits of a row as the kernels take them: all, or the kept ones gathered.
struct RowLogits {
  const void* data;
  int64_t size;
  int64_t target;  // place of the target; below 0: not among them
  KeptIds kept;
};

// Calls fn(pointer to an integer of the element's size).
template <typename Fn>
void with_item(DType dtype, const Fn& fn) {
  if (dtype == DType::kFloat32) return fn(static_cast<uint32_t*>(nullptr));
  return fn(static_cast<uint16_t*>(nullptr));
}

RowLogits logits_of(const LogitRows& logits, const Selection& selection, int64_t r,
                    Gathered* gathered) {
  const int64_t target = selection.target_ids[r];
  const KeptIds kept = selection.kept.of_row(r);
  if (kept.is_full()) return {logits.row(r), logits.vocab, target, kept};
  if (static_cast<int64_t>(gathered->size()) < kept.size) gathered->resize(kept.size);
  with_item(logits.dtype, [&](auto* null) {
    using Item = std::remove_pointer_t<decltype(null)>;
    const Item* row = reinterpret_cast<const Item*>(logits.row(r));
    Item* out = reinterpret_cast<Item*>(gathered->data());
    constexpr int64_t kAhead = 64;  // ids: random lines, which no hardware prefetches
    for (int64_t i = 0; i < kept.size; ++i) {
      const int64_t ahead = i + kAhead < kept.size ? i + kAhead : i;
      __builtin_prefetch(row + kept.ids[ahead], 0, 2);
      out[i] = row[kept.ids[i]];
    }
  });
  return {gathered->data(), kept.size, kept.find(target), kept};
}

// Masked rows cost nothing, so equal parts are not equal work: threads fetch rows dynamically.
template <typename Fn>
void for_each_row(const LogitRows& logits, int num_threads, const Fn& fn) {
  const int64_t rows_per_thread = kElementsPerThread / logits.vocab + 1;
  const int64_t rows_per_take = kElementsPerTake / logits.vocab + 1;
  const int64_t most = (logits.num_rows + rows_per_thread - 1) / rows_per_thread;
  const int64_t threads = most < num_threads ? most : num_threads;
  std::atomic<int64_t> next{0};
  parallel_for(static_cast<int>(threads), threads, 1, [&](int64_t begin, int64_t end) {
    Gathered gathered;
    for (int64_t worker = begin; worker < end; ++worker) {
      for (;;) {
        const int64_t first = next.fetch_add(rows_per_take, std::memory_order_relaxed);
        if (first >= logits.num_rows) break;
        const int64_t last = std::min(first + rows_per_take, logits.num_rows);
        for (int64_t r = first; r < last; ++r) fn(r, &gathered);
      }
    }
  });
}

int64_t row_bytes(const LogitRows& logits) {
  return logits.vocab * (logits.dtype == DType::kFloat32 ? 4 : 2);
}

RowStats forward_of(const RowKernels& kernels, const RowLogits& row, double temperature,
                    bool with_entropy) {
  RowStats stats = {0.0, -INFINITY, 0.0};  // of a slice that holds none of the row's ids
  if (row.size > 0) {
    kernels.forward(row.data, row.size, row.target, temperature, with_entropy, &stats);
  }
  return stats;
}

// Writes the gradient of a row, whose logits `grad` may overwrite.
void write_gradient(const RowKernels& kernels, const RowLogits& row, double temperature,
                    const RowStats& stats, const RowGrads& grads, const LogitRows& grad, int64_t r,
                    Gathered* gathered) {
  if (row.kept.is_full()) {
    kernels.backward(row.data, row.size, row.target, temperature, stats, grads, grad.row(r));
    return;
  }
  if (row.size > 0) {
    kernels.backward(row.data, row.size, row.target, temperature, stats, grads, gathered->data());
  }
  std::memset(grad.row(r), 0, row_bytes(grad));
  with_item(grad.dtype, [&](auto* null) {
    using Item = std::remove_pointer_t<decltype(null)>;
    Item* out = reinterpret_cast<Item*>(grad.row(r));
    const Item* in = reinterpret_cast<const Item*>(gathered->data());
    for (int64_t i = 0; i < row.size; ++i) out[row.kept.ids[i]] = in[i];
  });
}

// A gradient of a row's token.
struct TargetGrad {
  int64_t id;
  double value;
};

// Collects the gradients that are not 0, in the order of their ids; returns their sum.
double collect_gradients(const int64_t* ids, const float* gradients, int64_t count,
                         std::vector<TargetGrad>* collected) {
  collected->clear();
  double sum = 0.0;
  for (int64_t k = 0; k < count; ++k) {
    if (gradients[k] == 0.0f) continue;
    collected->push_back({ids[k], gradients[k]});
    sum += gradients[k];
  }
  // Stable: those of equal ids add in the same order every time.
  std::stable_sort(collected->begin(), collected->end(),
                   [](const TargetGrad& a, const TargetGrad& b) { return a.id < b.id; });
  return sum;
}

// Calls fn(id, sum of its gradients) for each id once.
template <typename Fn>
void for_each_id(const std::vector<TargetGrad>& collected, const Fn& fn) {
  size_t k = 0;
  while (k < collected.size()) {
    const int64_t id = collected[k].id;
    double sum = 0.0;
    for (; k < collected.size() && collected[k].id == id; ++k) sum += collected[k].value;
    fn(id, sum);
  }
}

// Calls fn(pointer to an element of the dtype).
template <typename Fn>
void with_element(DType dtype, const Fn& fn) {
  if (dtype == DType::kFloat32) return fn(static_cast<float*>(nullptr));
  if (dtype == DType::kBFloat16) return fn(static_cast<Bf16*>(nullptr));
  return fn(static_cast<Fp16*>(nullptr));
}

// The factor of a logit in the exponents of powers of two, as the row kernels have it.
double logit_scale(double temperature) {
  return static_cast<float>(1.4426950408889634 / temperature) * 0.6931471805599453;
}

}  // namespace

void check_kept_sets(const Selection& selection, int64_t num_rows, int64_t vocab) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const KeptIds kept = selection.kept.of_row(r);
    if (!selection.has(r) || kept.is_full()) continue;
    check_ids(selection, kept, vocab, r);
    const int64_t target = selection.target_ids[r];
    if (kept.size > 0 && kept.find(target) < 0) {
      throw std::invalid_argument(std::string(selection.op) +
                                  ": kept_ids must contain the row's target where the mask is 1, "
                                  "wanted " +
                                  std::to_string(target) + " in row " + std::to_string(r) +
                                  ", got " + std::to_string(kept.size) + " other ids");
    }
  }
}

void selected_logprob_cpu(const LogitRows& logits, const Selection& selection, float* logprob,
                          double* lse, float* entropy, int num_threads) {
  if (logits.num_rows == 0) return;
  check_targets(logits, selection);
  check_kept_sets(selection, logits.num_rows, logits.vocab);
  const RowKernels& kernels = row_kernels(logits.dtype);
  for_each_row(logits, num_threads, [&](int64_t r, Gathered* gathered) {
    RowStats stats = {0.0, 0.0, 0.0};
    if (selection.has(r)) {
      stats = forward_of(kernels, logits_of(logits, selection, r, gathered), selection.temperature,
                         entropy != nullptr);
    }
    logprob[r] = static_cast<float>(stats.logprob);
    lse[r] = stats.lse;
    if (entropy != nullptr) entropy[r] = static_cast<float>(stats.entropy);
  });
}

void selected_logprob_backward_cpu(const LogitRows& logits, const Selection& selection,
                                   const double* lse, const float* entropy,
                                   const float* grad_logprob, const float* grad_entropy,
                                   const LogitRows& grad, int num_threads) {
  if (logits.num_rows == 0) return;
  for (int64_t r = 0; r < logits.num_rows; ++r) {
    if (selection.has(r)) check_ids(selection, selection.kept.of_row(r), logits.vocab, r);
  }
  const RowKernels& kernels = row_kernels(logits.dtype);
  for_each_row(logits, num_threads, [&](int64_t r, Gathered* gathered) {
    const RowGrads grads = {grad_logprob ? grad_logprob[r] : 0.0,
                            grad_entropy ? grad_entropy[r] : 0.0};
    if (!selection.has(r) || (grads.logprob == 0.0 && grads.entropy == 0.0)) {
      std::memset(grad.row(r), 0, row_bytes(logits));
      return;
    }
    const RowStats stats = {0.0, lse[r], grads.entropy != 0.0 ? entropy[r] : 0.0};
    write_gradient(kernels, logits_of(logits, selection, r, gathered), selection.temperature, stats,
                   grads, grad, r, gathered);
  });
}

void masked_logprob_loss_cpu(const LogitRows& logits, const Selection& selection,
                             const TokenLossInputs& in, float* logprob, float* entropy,
                             const LogitRows* grad, int num_threads) {
  if (logits.num_rows == 0) return;
  check_targets(logits, selection);
  check_kept_sets(selection, logits.num_rows, logits.vocab);
  const RowKernels& kernels = row_kernels(logits.dtype);
  for_each_row(logits, num_threads, [&](int64_t r, Gathered* gathered) {
    RowStats stats = {0.0, 0.0, 0.0};
    RowLogits row = {};
    float loss_grad = 0.0f;
    if (selection.has(r)) {
      row = logits_of(logits, selection, r, gathered);
      stats = forward_of(kernels, row, selection.temperature, entropy != nullptr);
      loss_grad = loss_gradient(in, row_loss_inputs(in, r), static_cast<float>(stats.logprob));
    }
    logprob[r] = static_cast<float>(stats.logprob);
    if (entropy != nullptr) entropy[r] = static_cast<float>(stats.entropy);
    if (grad == nullptr) return;
    if (loss_grad == 0.0f) {
      std::memset(grad->row(r), 0, row_bytes(logits));
    } else {
      write_gradient(kernels, row, selection.temperature, stats, {loss_grad, 0.0}, *grad, r,
                     gathered);
    }
  });
}

void gathered_logprob_cpu(const LogitRows& logits, const GatheredIds& ids, float* logprob,
                          double* lse, int num_threads) {
  if (logits.num_rows == 0 || ids.per_row == 0) return;
  for (int64_t r = 0; r < logits.num_rows; ++r) {
    if (!ids.has(r)) continue;
    for (int64_t k = 0; k < ids.per_row; ++k) {
      const int64_t target = ids.of_row(r)[k];
      if (target < 0 || target >= logits.vocab) {
        fail_at_target("gathered_logprob", logits.vocab, target, r);
      }
    }
  }
  const RowKernels& kernels = row_kernels(logits.dtype);
  const double scale = logit_scale(ids.temperature);
  for_each_row(logits, num_threads, [&](int64_t r, Gathered*) {
    float* out = logprob + r * ids.per_row;
    lse[r] = 0.0;
    if (!ids.has(r)) {
      std::memset(out, 0, ids.per_row * sizeof(float));
      return;
    }
    const int64_t* targets = ids.of_row(r);
    RowStats stats;
    kernels.forward(logits.row(r), logits.vocab, targets[0], ids.temperature, false, &stats);
    lse[r] = stats.lse;
    with_element(logits.dtype, [&](auto* null) {
      const auto* row =
          reinterpret_cast<const std::remove_pointer_t<decltype(null)>*>(logits.row(r));
      for (int64_t k = 0; k < ids.per_row; ++k) {
        const double value = to_float(row[targets[k]]) * scale - stats.lse;
        out[k] = static_cast<float>(value > 0.0 ? 0.0 : value);
      }
    });
  });
}

void gathered_logprob_backward_cpu(const LogitRows& logits, const GatheredIds& ids,
                                   const double* lse, const float* grad_logprob,
                                   const LogitRows& grad, int num_threads) {
  if (logits.num_rows == 0) return;
  const RowKernels& kernels = row_kernels(logits.dtype);
  const double scale = logit_scale(ids.temperature);
  for_each_row(logits, num_threads, [&](int64_t r, Gathered*) {
    // Of this thread: rows need no allocation each.
    thread_local std::vector<TargetGrad> collected;
    const float* gradients = grad_logprob + r * ids.per_row;
    double sum = 0.0;
    collected.clear();
    if (ids.has(r)) sum = collect_gradients(ids.of_row(r), gradients, ids.per_row, &collected);
    if (collected.empty()) {
      std::memset(grad.row(r), 0, row_bytes(grad));
      return;
    }
    const RowStats stats = {0.0, lse[r], 0.0};
    kernels.backward(logits.row(r), logits.vocab, -1, ids.temperature, stats, {sum, 0.0},
                     grad.row(r));
    // The targets' gradients again, in double: one rounding to the dtype.
    with_element(logits.dtype, [&](auto* null) {
      using T = std::remove_pointer_t<decltype(null)>;
      const T* row = reinterpret_cast<const T*>(logits.row(r));
      T* out = reinterpret_cast<T*>(grad.row(r));
      for_each_id(collected, [&](int64_t id, double of_id) {
        const double p = std::exp(to_float(row[id]) * scale - lse[r]);
        out[id] = from_float<T>(static_cast<float>((of_id - p * sum) / ids.temperature));
      });
    });
  });
}

}  // namespace skyrl_fast
