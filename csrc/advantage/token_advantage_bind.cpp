// Token-level advantages: checks, then the launcher.
#include <memory>
#include <string>
#include <type_traits>

#include "advantage/token_advantage.h"
#include "bindings/ops.h"
#include "bindings/row_arguments.h"

namespace skyrl_fast {
namespace {

// gae, and with neither values nor returns reinforce_plus_plus.
void token_chain(const std::string& op, int64_t num_rows, py::handle rewards, py::handle values,
                 py::handle is_last_step, py::handle mask, py::handle cu_seqlens,
                 bool rewards_are_ragged, double gamma, double lambda, bool normalize,
                 py::handle advantages, py::handle returns, int num_threads) {
  RowArguments rows(op.c_str(), "loss_mask", num_rows, rewards, is_last_step, mask, cu_seqlens,
                    rewards_are_ragged, advantages);
  std::unique_ptr<Borrowed> value, result;
  if (!values.is_none()) value = std::make_unique<Borrowed>(values, op.c_str(), "values");
  if (!returns.is_none()) result = std::make_unique<Borrowed>(returns, op.c_str(), "returns");
  rows.with_mask([&](auto* mask_data) {
    TokenChain<std::remove_const_t<std::remove_pointer_t<decltype(mask_data)>>> chain;
    chain.op = op.c_str();
    chain.rewards = rows.rewards();
    chain.rewards_layout = rows.rewards_layout();
    chain.rewards_per_row = rows.rewards_per_row();
    chain.values = value ? rows.like_out(*value) : nullptr;
    chain.is_last_step = rows.is_last_step();
    chain.mask = mask_data;
    chain.layout = rows.layout();
    chain.gamma = gamma;
    chain.lambda = lambda;
    chain.advantages = rows.out();
    chain.returns = result ? rows.like_out(*result) : nullptr;
    py::gil_scoped_release release;
    token_chain_cpu(chain, normalize, num_threads);
  });
}

}  // namespace

void bind_token_advantage(py::module_& m) {
  m.def("token_chain", &token_chain, py::arg("op"), py::arg("num_rows"), py::arg("rewards"),
        py::arg("values"), py::arg("is_last_step"), py::arg("mask"), py::arg("cu_seqlens"),
        py::arg("rewards_are_ragged"), py::arg("gamma"), py::arg("lambd"), py::arg("normalize"),
        py::arg("advantages"), py::arg("returns"), py::arg("num_threads"));
}

}  // namespace skyrl_fast
