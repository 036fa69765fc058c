// count_nonzeros, sum_rows, divide_rows, multiply_rows, copy_cells: checks, then the launchers.
#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "bindings/borrow.h"
#include "bindings/ops.h"
#include "pack/cell_rows.h"

namespace py = pybind11;

namespace skyrl_fast {
namespace {

// A contiguous (N, R) array of the CPU.
void check_cells(const TensorView& t, DType dtype) {
  check_cpu_array(t, dtype, 2);
  check_contiguous(t);
}

void check_rows(const TensorView& t, DType dtype, int64_t num_rows) {
  check_cpu_array(t, dtype, 1);
  check_size(t, 0, num_rows);
}

int64_t count_nonzeros(py::handle cells_obj, py::handle ids_obj, py::handle nonzeros_obj,
                       py::handle lasts_obj, int num_threads) {
  constexpr char kOp[] = "count_nonzeros";
  Borrowed cells(cells_obj, kOp, "cells"), nonzeros(nonzeros_obj, kOp, "nonzeros");
  Borrowed lasts(lasts_obj, kOp, "lasts");
  check_cells(*cells, DType::kFloat32);
  std::optional<Borrowed> ids;
  int64_t num_rows = cells->shape[0];
  if (!ids_obj.is_none()) {
    ids.emplace(ids_obj, kOp, "row_ids");
    check_cpu_array(**ids, DType::kInt64, 1);
    const int64_t* id = (*ids)->ptr<int64_t>();
    for (int64_t i = 0; i < (*ids)->shape[0]; ++i) {
      if (id[i] < 0 || id[i] >= num_rows) fail(**ids, "rows of cells", std::to_string(id[i]));
    }
    num_rows = (*ids)->shape[0];
  }
  check_rows(*nonzeros, DType::kInt64, num_rows);
  check_rows(*lasts, DType::kFloat32, num_rows);
  py::gil_scoped_release release;
  return count_nonzeros_cpu(cells->ptr<float>(), cells->shape[1],
                            ids ? (*ids)->ptr<int64_t>() : nullptr, num_rows,
                            nonzeros->ptr<int64_t>(), lasts->ptr<float>(), num_threads);
}

void sum_rows(py::handle cells_obj, py::handle cu_obj, py::handle sums_obj, int num_threads) {
  constexpr char kOp[] = "sum_rows";
  Borrowed cells(cells_obj, kOp, "cells"), cu(cu_obj, kOp, "cu_seqlens");
  Borrowed sums(sums_obj, kOp, "sums");
  check_cpu_array(*cells, DType::kFloat32, 1);
  check_contiguous(*cells);
  check_cpu_array(*sums, DType::kFloat64, 1);
  RowLayout rows;
  rows.num_rows = sums->shape[0];
  check_rows(*cu, DType::kInt32, rows.num_rows + 1);
  rows.cu = cu->ptr<int32_t>();
  for (int64_t i = 0; i <= rows.num_rows; ++i) {
    if (rows.cu[i] < (i > 0 ? rows.cu[i - 1] : 0) || rows.cu[i] > cells->shape[0]) {
      fail(*cu, "non-decreasing offsets from 0 to " + std::to_string(cells->shape[0]) + " at most",
           std::to_string(rows.cu[i]) + " at " + std::to_string(i));
    }
  }
  py::gil_scoped_release release;
  sum_rows_cpu(cells->ptr<float>(), rows, sums->ptr<double>(), num_threads);
}

void divide_rows(py::handle cells_obj, py::handle divisors_obj, py::handle out_obj,
                 int num_threads) {
  constexpr char kOp[] = "divide_rows";
  Borrowed cells(cells_obj, kOp, "cells"), divisors(divisors_obj, kOp, "divisors");
  Borrowed out(out_obj, kOp, "out");
  check_cells(*cells, DType::kFloat32);
  check_cells(*out, DType::kFloat32);
  const int64_t num_rows = cells->shape[0], width = cells->shape[1];
  check_size(*out, 0, num_rows);
  check_size(*out, 1, width);
  check_cpu_array(*divisors, DType::kFloat32, 1);
  const bool one_divisor = divisors->shape[0] == 1;
  if (!one_divisor) check_size(*divisors, 0, num_rows);
  py::gil_scoped_release release;
  divide_rows_cpu(cells->ptr<float>(), num_rows, width, divisors->ptr<float>(), one_divisor,
                  out->ptr<float>(), num_threads);
}

void multiply_rows(py::handle values_obj, py::handle mask_obj, py::handle out_obj,
                   py::handle counts_obj, int num_threads) {
  constexpr char kOp[] = "multiply_rows";
  Borrowed values(values_obj, kOp, "values"), mask(mask_obj, kOp, "mask");
  Borrowed out(out_obj, kOp, "out"), counts(counts_obj, kOp, "counts");
  check_cells(*mask, DType::kInt64);
  check_cells(*out, DType::kFloat32);
  const int64_t num_rows = mask->shape[0], width = mask->shape[1];
  check_size(*out, 0, num_rows);
  check_size(*out, 1, width);
  check_rows(*values, DType::kFloat32, num_rows);
  check_rows(*counts, DType::kInt64, num_rows);
  py::gil_scoped_release release;
  multiply_rows_cpu(values->ptr<float>(), mask->ptr<int64_t>(), num_rows, width, out->ptr<float>(),
                    counts->ptr<int64_t>(), num_threads);
}

void copy_cells(py::handle cells_obj, py::handle out_obj, int num_threads) {
  constexpr char kOp[] = "copy_cells";
  Borrowed cells(cells_obj, kOp, "cells"), out(out_obj, kOp, "out");
  for (const Borrowed* bytes : {&cells, &out}) {
    check_cpu(**bytes);
    check_contiguous(**bytes);
    check_dtype(**bytes, DType::kUInt8);
  }
  if (out->numel() != cells->numel()) fail(*out, "as large as cells", out->shape_string());
  py::gil_scoped_release release;
  copy_cells_cpu(cells->data, cells->numel(), out->data, num_threads);
}

}  // namespace

void bind_cell_rows(py::module_& m) {
  m.def("count_nonzeros", &count_nonzeros, py::arg("cells"), py::arg("ids"), py::arg("nonzeros"),
        py::arg("lasts"), py::arg("num_threads"));
  m.def("sum_rows", &sum_rows, py::arg("cells"), py::arg("cu_seqlens"), py::arg("sums"),
        py::arg("num_threads"));
  m.def("divide_rows", &divide_rows, py::arg("cells"), py::arg("divisors"), py::arg("out"),
        py::arg("num_threads"));
  m.def("multiply_rows", &multiply_rows, py::arg("values"), py::arg("mask"), py::arg("out"),
        py::arg("counts"), py::arg("num_threads"));
  m.def("copy_cells", &copy_cells, py::arg("cells"), py::arg("out"), py::arg("num_threads"));
}

}  // namespace skyrl_fast
