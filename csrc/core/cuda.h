// The CUDA runtime for host code: errors as exceptions. Kernels run on the current device, which
// the Python code has set (skyrl_fast/ops/_backend.py).
#pragma once

#if defined(SKYRL_FAST_EMULATE_CUDA)
#include "emulation/cuda_on_cpu.h"
#else
#include <cuda_runtime_api.h>
#endif

#include <stdexcept>
#include <string>

namespace skyrl_fast {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

}  // namespace skyrl_fast
