// Packing on CUDA tensors: checks, launch. Offsets were checked before they were sent
// to the device; sizes derived from them are arguments.
#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bindings/cuda_arguments.h"
#include "bindings/ops.h"
#include "pack/pack.h"
#include "pack/pack_cuda.h"

namespace skyrl_fast {
namespace {

// Borrows arrays for the length of a call, all on one device.
class SKYRL_HIDDEN Arrays {
 public:
  explicit Arrays(const char* op) : op_(op) {}
  const TensorView& take(py::handle object, const char* name) {
    borrowed_.push_back(std::make_unique<Borrowed>(object, op_, name));
    const TensorView& t = **borrowed_.back();
    check_cuda(t);
    check_contiguous(t);
    check_same_device(t, **borrowed_.front());
    return t;
  }
  const int64_t* offsets(py::handle object, int64_t num_rows) {
    const TensorView& t = take(object, "offsets");
    return cuda_array<int64_t>(t, DType::kInt64, num_rows + 1, t);
  }

 private:
  const char* op_;
  std::vector<std::unique_ptr<Borrowed>> borrowed_;
};

MoveJob move_job(Arrays& arrays, const TensorView& padded, const TensorView& flat,
                 py::handle cu_obj, py::handle starts_obj) {
  MoveJob job;
  job.num_rows = padded.shape[0];
  job.width = padded.shape[1];
  job.cu = arrays.offsets(cu_obj, padded.shape[0]);
  job.starts = cuda_array<int64_t>(arrays.take(starts_obj, "starts"), DType::kInt64,
                                   padded.shape[0], padded);
  job.cell_bytes = element_size(padded.dtype);
  for (int d = 2; d < padded.ndim; ++d) job.cell_bytes *= padded.shape[d];
  int64_t flat_bytes = element_size(flat.dtype);
  for (int d = 1; d < flat.ndim; ++d) flat_bytes *= flat.shape[d];
  check_dtype(flat, padded.dtype);
  if (flat_bytes != job.cell_bytes) fail(flat, "with cells like padded's", flat.shape_string());
  return job;
}

// padded (N, W, ...), cu int64 (N + 1,), starts int64 (N,) -> flat (S, ...) and position ids int64
// (S,).
void padded_to_flat(py::handle padded_obj, py::handle cu_obj, py::handle starts_obj,
                    py::handle flat_obj, py::handle positions_obj, uintptr_t stream) {
  Arrays arrays("padded_to_varlen");
  const TensorView& padded = arrays.take(padded_obj, "padded");
  const TensorView& flat = arrays.take(flat_obj, "out");
  const MoveJob job = move_job(arrays, padded, flat, cu_obj, starts_obj);
  const TensorView& t = arrays.take(positions_obj, "position_ids");
  int64_t* positions = cuda_array<int64_t>(t, DType::kInt64, flat.shape[0], padded);
  py::gil_scoped_release release;
  padded_to_flat_cuda(job, padded.data, flat.data, positions, stream_of(stream));
}

// flat (S, ...), cu int64 (N + 1,), starts int64 (N,) -> padded (N, W, ...); `pattern`: an
// element's bytes, repeated to 16.
void flat_to_padded(py::handle flat_obj, py::handle cu_obj, py::handle starts_obj,
                    const py::bytes& pattern, py::handle padded_obj, uintptr_t stream) {
  Arrays arrays("varlen_to_padded");
  const TensorView& padded = arrays.take(padded_obj, "out");
  const TensorView& flat = arrays.take(flat_obj, "values");
  const MoveJob job = move_job(arrays, padded, flat, cu_obj, starts_obj);
  const std::string bytes = pattern;
  uint32_t words[4];
  if (bytes.size() != sizeof(words)) {
    throw std::invalid_argument("varlen_to_padded: pattern must have 16 bytes");
  }
  std::memcpy(words, bytes.data(), sizeof(words));
  py::gil_scoped_release release;
  flat_to_padded_cuda(job, flat.data, words, padded.data, stream_of(stream));
}

}  // namespace

void bind_pack_cuda(py::module_& m) {
  m.def("padded_to_flat_cuda", &padded_to_flat, py::arg("padded"), py::arg("cu_seqlens"),
        py::arg("starts"), py::arg("flat"), py::arg("positions"), py::arg("stream"));
  m.def("flat_to_padded_cuda", &flat_to_padded, py::arg("flat"), py::arg("cu_seqlens"),
        py::arg("starts"), py::arg("pattern"), py::arg("padded"), py::arg("stream"));
}

}  // namespace skyrl_fast
