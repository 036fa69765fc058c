// Turn-level advantages: checks, then the launchers.
#include <vector>

#include "advantage/turn_advantage.h"
#include "bindings/ops.h"
#include "bindings/row_arguments.h"

namespace skyrl_fast {
namespace {

const int64_t* row_ids(const Borrowed& ids, int64_t num_rows) {
  check_cpu_array(*ids, DType::kInt64, 1);
  check_size(*ids, 0, num_rows);
  return ids->ptr<int64_t>();
}

// Computes one value per row by `launch(turns, row_values)` and broadcasts it over the row's cells.
template <typename Launch>
void run_turns(const RowArguments& rows, Turns turns, int num_threads, const Launch& launch) {
  turns.rewards = rows.rewards();
  turns.layout = rows.rewards_layout();
  turns.is_last_step = rows.is_last_step();
  rows.with_mask([&](auto* mask) {
    py::gil_scoped_release release;
    std::vector<float> row_values(turns.layout.num_rows);
    launch(turns, row_values.data());
    broadcast_rows([&](int64_t row) { return row_values[row]; }, mask, rows.layout(), rows.out(),
                   num_threads);
  });
}

void turn_level_returns(int64_t num_rows, py::handle rewards, py::handle is_last_step,
                        py::handle mask, py::handle cu_seqlens, bool rewards_are_ragged,
                        double gamma, py::handle out, int num_threads) {
  const char* op = "turn_level_returns";
  RowArguments rows(op, "response_mask", num_rows, rewards, is_last_step, mask, cu_seqlens,
                    rewards_are_ragged, out);
  Turns turns;
  turns.op = op;
  turns.gamma = gamma;
  run_turns(rows, turns, num_threads, [&](const Turns& t, float* row_values) {
    turn_level_returns_cpu(t, row_values, num_threads);
  });
}

void turn_group_advantage(py::handle rewards, py::handle group_ids, py::handle is_last_step,
                          py::handle mask, py::handle cu_seqlens, bool rewards_are_ragged,
                          double gamma, int baseline, bool scale_by_std, py::handle out,
                          int num_threads) {
  const char* op = "turn_group_advantage";
  Borrowed groups(group_ids, op, "group_ids");
  const int64_t num_rows = groups->shape[0];
  RowArguments rows(op, "response_mask", num_rows, rewards, is_last_step, mask, cu_seqlens,
                    rewards_are_ragged, out);
  Turns turns;
  turns.op = op;
  turns.gamma = gamma;
  turns.group_ids = row_ids(groups, num_rows);
  run_turns(rows, turns, num_threads, [&](const Turns& t, float* row_values) {
    turn_group_advantage_cpu(t, static_cast<TurnBaseline>(baseline), scale_by_std, row_values,
                             num_threads);
  });
}

void gigpo_advantage(py::handle rewards, py::handle group_ids, py::handle anchor_ids,
                     py::handle is_last_step, py::handle mask, py::handle cu_seqlens,
                     bool rewards_are_ragged, double gamma, double step_weight, bool scale_by_std,
                     py::handle out, int num_threads) {
  const char* op = "gigpo_advantage";
  Borrowed groups(group_ids, op, "group_ids"), anchors(anchor_ids, op, "anchor_ids");
  const int64_t num_rows = groups->shape[0];
  RowArguments rows(op, "response_mask", num_rows, rewards, is_last_step, mask, cu_seqlens,
                    rewards_are_ragged, out);
  Turns turns;
  turns.op = op;
  turns.gamma = gamma;
  turns.group_ids = row_ids(groups, num_rows);
  const int64_t* anchor = row_ids(anchors, num_rows);
  run_turns(rows, turns, num_threads, [&](const Turns& t, float* row_values) {
    gigpo_advantage_cpu(t, anchor, step_weight, scale_by_std, row_values, num_threads);
  });
}

}  // namespace

void bind_turn_advantage(py::module_& m) {
  m.def("turn_level_returns", &turn_level_returns, py::arg("num_rows"), py::arg("rewards"),
        py::arg("is_last_step"), py::arg("mask"), py::arg("cu_seqlens"),
        py::arg("rewards_are_ragged"), py::arg("gamma"), py::arg("out"), py::arg("num_threads"));
  m.def("turn_group_advantage", &turn_group_advantage, py::arg("rewards"), py::arg("group_ids"),
        py::arg("is_last_step"), py::arg("mask"), py::arg("cu_seqlens"),
        py::arg("rewards_are_ragged"), py::arg("gamma"), py::arg("baseline"),
        py::arg("scale_by_std"), py::arg("out"), py::arg("num_threads"));
  m.def("gigpo_advantage", &gigpo_advantage, py::arg("rewards"), py::arg("group_ids"),
        py::arg("anchor_ids"), py::arg("is_last_step"), py::arg("mask"), py::arg("cu_seqlens"),
        py::arg("rewards_are_ragged"), py::arg("gamma"), py::arg("step_weight"),
        py::arg("scale_by_std"), py::arg("out"), py::arg("num_threads"));
}

}  // namespace skyrl_fast
