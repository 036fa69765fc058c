// The CUDA runtime for host code: errors as exceptions, and the device a launch runs on.
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

// Makes `device` current while it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cuda_check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) cuda_check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace skyrl_fast
