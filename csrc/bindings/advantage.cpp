// group_advantage: checks, then the launcher.
#include "advantage.h"

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "bindings/borrow.h"
#include "bindings/ops.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "group_advantage";

RowLayout layout_of(const TensorView& t, const TensorView* cu, int64_t num_rows) {
  RowLayout layout;
  layout.num_rows = num_rows;
  if (cu != nullptr && t.ndim == 1) {
    layout.cu = cu->ptr<int32_t>();
  } else {
    layout.width = t.ndim == 2 ? t.shape[1] : 1;
  }
  return layout;
}

// (N,) or (N, R)
void check_rows(const TensorView& t, int64_t num_rows) {
  if (t.ndim != 1 && t.ndim != 2) fail(t, "(N,) or (N, R)", t.shape_string());
  check_size(t, 0, num_rows);
}

void check_cu_seqlens(const TensorView& cu, int64_t num_rows, int64_t num_cells) {
  check_cpu_array(cu, DType::kInt32, 1);
  check_size(cu, 0, num_rows + 1);
  const int32_t* p = cu.ptr<int32_t>();
  if (p[0] != 0 || p[num_rows] != num_cells) {
    fail(cu, "offsets from 0 to " + std::to_string(num_cells),
         "offsets from " + std::to_string(p[0]) + " to " + std::to_string(p[num_rows]));
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    if (p[i + 1] < p[i]) {
      fail(cu, "non-decreasing", "a step back at row " + std::to_string(i));
    }
  }
}

// rewards float32 (N,) scores, (N, R) or, with cu_seqlens, (A,); out like the mask's shape.
void group_advantage(py::handle rewards_obj, py::handle group_ids_obj, py::handle is_last_obj,
                     py::handle mask_obj, py::handle cu_obj, bool rewards_are_ragged, int estimator,
                     py::handle out_obj, int num_threads) {
  Borrowed rewards(rewards_obj, kOp, "rewards");
  Borrowed group_ids(group_ids_obj, kOp, "group_ids");
  Borrowed out(out_obj, kOp, "response_mask");
  check_cpu_array(*group_ids, DType::kInt64, 1);
  const int64_t n = group_ids->shape[0];

  check_cpu(*rewards);
  check_dtype(*rewards, DType::kFloat32);
  check_contiguous(*rewards);
  check_cpu(*out);
  check_dtype(*out, DType::kFloat32);
  check_contiguous(*out);

  std::optional<Borrowed> cu, is_last, mask;
  if (cu_obj.is_none()) {
    check_rows(*out, n);
  } else {
    cu.emplace(cu_obj, kOp, "cu_seqlens");
    check_ndim(*out, 1);
    check_cu_seqlens(**cu, n, out->numel());
  }
  if (rewards_are_ragged) {
    check_ndim(*rewards, 1);
    check_size(*rewards, 0, out->numel());
  } else {
    check_rows(*rewards, n);
  }
  if (!is_last_obj.is_none()) {
    is_last.emplace(is_last_obj, kOp, "is_last_step");
    check_cpu(**is_last);
    check_ndim(**is_last, 1);
    check_contiguous(**is_last);
    if ((*is_last)->dtype != DType::kBool && (*is_last)->dtype != DType::kUInt8) {
      fail(**is_last, "bool", dtype_name((*is_last)->dtype));
    }
    check_size(**is_last, 0, n);
  }
  if (!mask_obj.is_none()) {
    mask.emplace(mask_obj, kOp, "response_mask");
    check_cpu(**mask);
    check_contiguous(**mask);
    if ((*mask)->shape_string() != out->shape_string()) {
      fail(**mask, "of shape " + out->shape_string(), (*mask)->shape_string());
    }
  }
  const RowLayout rewards_layout = layout_of(*rewards, rewards_are_ragged ? &**cu : nullptr, n);
  const RowLayout out_layout = layout_of(*out, cu ? &**cu : nullptr, n);
  const uint8_t* last = is_last ? (*is_last)->ptr<uint8_t>() : nullptr;

  auto launch = [&](auto* mask_data) {
    py::gil_scoped_release release;
    group_advantage_cpu(rewards->ptr<float>(), rewards_layout, group_ids->ptr<int64_t>(), last,
                        mask_data, static_cast<Estimator>(estimator), out_layout, out->ptr<float>(),
                        num_threads);
  };
  if (!mask) return launch(static_cast<const float*>(nullptr));
  switch ((*mask)->dtype) {
    case DType::kBool:
    case DType::kUInt8: return launch((*mask)->ptr<const uint8_t>());
    case DType::kInt64: return launch((*mask)->ptr<const int64_t>());
    case DType::kFloat32: return launch((*mask)->ptr<const float>());
    default: fail(**mask, "bool, uint8, int64 or float32", dtype_name((*mask)->dtype));
  }
}

// Comparing or hashing an element can run Python code, and that can change the list.
void check_still(const py::object& values, Py_ssize_t size, const char* name) {
  if (PySequence_Fast_GET_SIZE(values.ptr()) != size) {
    throw std::invalid_argument(
        std::string(kOp) + ": " + name + " changed its length from " + std::to_string(size) +
        " to " + std::to_string(PySequence_Fast_GET_SIZE(values.ptr())) + " while it was read");
  }
}

// Dense ids of hashable labels (strings, ints) in order of first appearance.
void dense_ids(py::handle labels_obj, py::handle out_obj) {
  Borrowed out(out_obj, kOp, "group_ids");
  check_cpu_array(*out, DType::kInt64, 1);
  py::object labels = py::reinterpret_steal<py::object>(
      PySequence_Fast(labels_obj.ptr(), "group_advantage: group_ids must be a sequence"));
  if (!labels) throw py::error_already_set();
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(labels.ptr());
  check_size(*out, 0, n);
  int64_t* ids = out->ptr<int64_t>();
  py::dict seen;
  py::object previous;
  for (Py_ssize_t i = 0; i < n; ++i) {
    check_still(labels, n, "group_ids");
    py::object label =
        py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(labels.ptr(), i));
    if (label.ptr() == previous.ptr()) {  // the same object as in the row before: no look-up
      ids[i] = ids[i - 1];
      continue;
    }
    if (!PyUnicode_Check(label.ptr()) && !PyLong_Check(label.ptr())) {
      throw py::type_error(std::string(kOp) + ": group_ids must be strings or ints, but entry " +
                           std::to_string(i) + " is a " + Py_TYPE(label.ptr())->tp_name);
    }
    py::object next = py::int_(PyDict_GET_SIZE(seen.ptr()));
    PyObject* id = PyDict_SetDefault(seen.ptr(), label.ptr(), next.ptr());
    if (id == nullptr) throw py::error_already_set();
    ids[i] = PyLong_AsLongLong(id);
    previous = std::move(label);
  }
  check_still(labels, n, "group_ids");
}

// Flags from a sequence of bools (Python's, numpy's, or ints 0 and 1).
void flags(py::handle values_obj, py::handle out_obj, const char* name) {
  Borrowed out(out_obj, kOp, name);
  check_cpu_array(*out, DType::kBool, 1);
  py::object values = py::reinterpret_steal<py::object>(
      PySequence_Fast(values_obj.ptr(), "group_advantage: flags must be a sequence"));
  if (!values) throw py::error_already_set();
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(values.ptr());
  check_size(*out, 0, n);
  uint8_t* flag = out->ptr<uint8_t>();
  for (Py_ssize_t i = 0; i < n; ++i) {
    check_still(values, n, name);
    PyObject* item = PySequence_Fast_GET_ITEM(values.ptr(), i);
    if (item == Py_True || item == Py_False) {
      flag[i] = item == Py_True;
      continue;
    }
    const auto value = py::reinterpret_borrow<py::object>(item);
    if (!PyNumber_Check(item)) {
      throw py::type_error(std::string(kOp) + ": " + name + " must be bools, but entry " +
                           std::to_string(i) + " is a " + Py_TYPE(item)->tp_name);
    }
    const int truth = PyObject_IsTrue(item);
    if (truth < 0) throw py::error_already_set();
    flag[i] = static_cast<uint8_t>(truth);
  }
}

}  // namespace

void bind_advantage(py::module_& m) {
  m.def("group_advantage", &group_advantage);
  m.def("dense_ids", &dense_ids);
  m.def("flags", &flags);
}

}  // namespace skyrl_fast
