// The extension module skyrl_fast._C.
#include <pybind11/pybind11.h>

#include "bindings/borrow.h"
#include "bindings/ops.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Kernels of skyrl_fast. Private: use the functions of skyrl_fast and skyrl_fast.ops.";
#if defined(SKYRL_FAST_WITH_CUDA)
  m.attr("cuda_archs") = SKYRL_FAST_CUDA_ARCHS;
#else
  m.attr("cuda_archs") = py::none();
#endif
  m.attr("compiler") =
#if defined(__clang__)
      "clang " __clang_version__;
#else
      "gcc " __VERSION__;
#endif
  skyrl_fast::bind_pack(m);  // first: other signatures use its classes
  skyrl_fast::bind_advantage(m);
  skyrl_fast::bind_cell_rows(m);
  skyrl_fast::bind_logprob(m);
#if defined(SKYRL_FAST_WITH_CUDA)
  skyrl_fast::bind_advantage_cuda(m);
  skyrl_fast::bind_cuda_versions(m);
  skyrl_fast::bind_logprob_cuda(m);
  skyrl_fast::bind_pack_cuda(m);
  skyrl_fast::bind_policy_loss_cuda(m);
#endif
  skyrl_fast::bind_merge(m);
  skyrl_fast::bind_off_policy(m);
  skyrl_fast::bind_page_pool(m);
  skyrl_fast::bind_passes(m);
  skyrl_fast::bind_policy_loss(m);
  skyrl_fast::bind_prefix_tree(m);
  skyrl_fast::bind_tree_attention(m);
  skyrl_fast::bind_token_advantage(m);
  skyrl_fast::bind_turn_advantage(m);
}
