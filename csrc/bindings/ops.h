// One function per *_bind.cpp file; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace skyrl_fast {

void bind_advantage(pybind11::module_& m);
void bind_advantage_cuda(pybind11::module_& m);  // CUDA builds only
void bind_cell_rows(pybind11::module_& m);
void bind_cuda_versions(pybind11::module_& m);  // CUDA builds only
void bind_logprob(pybind11::module_& m);
void bind_logprob_cuda(pybind11::module_& m);  // CUDA builds only
void bind_merge(pybind11::module_& m);
void bind_off_policy(pybind11::module_& m);
void bind_pack(pybind11::module_& m);
void bind_pack_cuda(pybind11::module_& m);  // CUDA builds only
void bind_passes(pybind11::module_& m);
void bind_page_pool(pybind11::module_& m);
void bind_policy_loss(pybind11::module_& m);
void bind_policy_loss_cuda(pybind11::module_& m);  // CUDA builds only
void bind_prefix_tree(pybind11::module_& m);
void bind_tree_attention(pybind11::module_& m);
void bind_token_advantage(pybind11::module_& m);
void bind_turn_advantage(pybind11::module_& m);

}  // namespace skyrl_fast
