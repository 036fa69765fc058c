// The module that tests load: the CUDA ops of _C on the CPU, and the settings of the emulation.
#include <pybind11/pybind11.h>

#include "bindings/ops.h"
#include "emulation/cuda_on_cpu.h"

namespace py = pybind11;

PYBIND11_MODULE(_cuda_on_cpu, m) {
  using skyrl_fast::emulation::settings;
  m.def("set_order", [](int order) { settings().order = order; }, py::arg("order"));
  m.def("set_compute_major", [](int major) { settings().compute_major = major; }, py::arg("major"));
  m.def("launches", [] { return settings().num_launches; });
  m.def("last_launch", [] {
    const auto& s = settings();
    return py::make_tuple(s.last_grid_x, s.last_grid_y, s.last_cluster);
  });
  skyrl_fast::bind_advantage_cuda(m);
  skyrl_fast::bind_logprob_cuda(m);
  skyrl_fast::bind_pack_cuda(m);
  skyrl_fast::bind_policy_loss_cuda(m);
}
