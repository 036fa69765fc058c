// Versions of CUDA: of the runtime inside this extension, and of the installed driver.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include "bindings/ops.h"

namespace skyrl_fast {
namespace {

// Neither call starts the driver, so that they also answer where it is too old; 0: there is none.
std::pair<int, int> cuda_versions() {
  int runtime = 0;
  int driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  return {runtime, driver};
}

}  // namespace

void bind_cuda_versions(pybind11::module_& m) {
  m.def("cuda_versions", &cuda_versions,
        "Return CUDA's version of the runtime inside, and the newest of the driver: 13000, 12080.");
}

}  // namespace skyrl_fast
