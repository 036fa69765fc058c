// The arrays of one forward pass, written from the batch's flat arrays.
// n sequences of length L, or 1 of T nodes; M trained tokens, K of them distinct.
#pragma once

#include <cstdint>

#include "passes/pass_plan.h"

namespace skyrl_fast {

// The tokens that each response token was sampled from; see `StepBatch.num_kept`.
struct KeptRows {
  const int32_t* num_kept = nullptr;  // (A,) or null
  const int32_t* ids = nullptr;
  const int64_t* cu_kept = nullptr;  // (N + 1,) offsets of the rows' ids
};

// Allocated by the caller. A token's state is the index of the token or node before it.
struct PassArrays {
  int64_t* input_ids;       // (n, L) padded on the right with 0, or (1, T)
  int64_t* rows;            // ascending
  int64_t* hidden_index;    // (M,) of which K are written: states that predict trained tokens
  int64_t* target_ids;      // (M,) of which K are written
  int64_t* response_index;  // (M,) in the response tokens of `rows`
  // Of trees:
  int64_t* copies;     // (M,) each trained token's place among the K; unless K = M
  int32_t* parents;    // (T,)
  int32_t* ends;       // (T,) one past the last node below
  int64_t* positions;  // (T,) depth
  // Null without kept tokens:
  int32_t* kept_ids;  // `num_kept_tokens` of which those of the K are written
  int64_t* cu_kept;   // (M + 1,) of which K + 1 are written
  // Null without routes:
  uint8_t* routes;        // one cell per token; 0 where none is recorded
  uint8_t* has_no_route;  // one per token
};

// The kept tokens of all M trained tokens of a pass.
int64_t num_kept_tokens(const PassRows& rows, const Pass& pass, const KeptRows& kept);

// Returns K. Trained tokens of a tree with the same target, kept tokens and state are one: sorted
// by state, target and kept tokens, unless all are distinct.
int64_t write_pass_cpu(const PassRows& rows, const PassPlan& plan, const Pass& pass,
                       const KeptRows& kept, const PassArrays& out);

}  // namespace skyrl_fast
