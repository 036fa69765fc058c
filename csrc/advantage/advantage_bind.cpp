// group_advantage: checks, then the launcher.
#include <pybind11/pybind11.h>

#include <cstring>
#include <string>

#include "advantage/advantage.h"
#include "bindings/ops.h"
#include "bindings/row_arguments.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "group_advantage";

// rewards float32 (N,) scores, (N, R) or, with cu_seqlens, (A,); out like the mask's shape.
void group_advantage(py::handle rewards, py::handle group_ids, py::handle is_last_step,
                     py::handle mask, py::handle cu_seqlens, bool rewards_are_ragged, int estimator,
                     py::handle out, int num_threads) {
  Borrowed groups(group_ids, kOp, "group_ids");
  check_cpu_array(*groups, DType::kInt64, 1);
  RowArguments rows(kOp, "response_mask", groups->shape[0], rewards, is_last_step, mask, cu_seqlens,
                    rewards_are_ragged, out);
  rows.with_mask([&](auto* mask_data) {
    py::gil_scoped_release release;
    group_advantage_cpu(rows.rewards(), rows.rewards_layout(), groups->ptr<int64_t>(),
                        rows.is_last_step(), mask_data, static_cast<Estimator>(estimator),
                        rows.layout(), rows.out(), num_threads);
  });
}

// Comparing or hashing an element can run Python code, and that can change the list.
void check_still(const py::object& values, Py_ssize_t size, const std::string& what) {
  if (PySequence_Fast_GET_SIZE(values.ptr()) != size) {
    throw std::invalid_argument(what + " changed its length from " + std::to_string(size) + " to " +
                                std::to_string(PySequence_Fast_GET_SIZE(values.ptr())) +
                                " while it was read");
  }
}

// Whether two labels are plain, equal strings: cheaper than a dict look-up.
bool equal_strings(PyObject* a, PyObject* b) {
  if (!PyUnicode_CheckExact(a) || !PyUnicode_CheckExact(b)) return false;
  const Py_ssize_t length = PyUnicode_GET_LENGTH(a);
  return length == PyUnicode_GET_LENGTH(b) && PyUnicode_KIND(a) == PyUnicode_KIND(b) &&
         std::memcmp(PyUnicode_DATA(a), PyUnicode_DATA(b), length * PyUnicode_KIND(a)) == 0;
}

// Dense ids of hashable labels (strings, ints) in order of first appearance.
void dense_ids(py::handle labels_obj, py::handle out_obj, const std::string& op,
               const std::string& name) {
  Borrowed out(out_obj, op.c_str(), name.c_str());
  const std::string what = op + ": " + name;
  check_cpu_array(*out, DType::kInt64, 1);
  py::object labels = py::reinterpret_steal<py::object>(
      PySequence_Fast(labels_obj.ptr(), (what + ": expected a sequence").c_str()));
  if (!labels) throw py::error_already_set();
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(labels.ptr());
  check_size(*out, 0, n);
  int64_t* ids = out->ptr<int64_t>();
  py::dict seen;
  py::object previous;
  for (Py_ssize_t i = 0; i < n; ++i) {
    check_still(labels, n, what);
    py::object label =
        py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(labels.ptr(), i));
    if (label.ptr() == previous.ptr()) {  // the same object as in the row before: no look-up
      ids[i] = ids[i - 1];
      continue;
    }
    if (!PyUnicode_Check(label.ptr()) && !PyLong_Check(label.ptr())) {
      throw py::type_error(what + ": expected strings or ints, but entry " + std::to_string(i) +
                           " is a " + Py_TYPE(label.ptr())->tp_name);
    }
    if (previous && equal_strings(label.ptr(), previous.ptr())) {
      ids[i] = ids[i - 1];
      continue;
    }
    py::object next = py::int_(PyDict_GET_SIZE(seen.ptr()));
    PyObject* id = PyDict_SetDefault(seen.ptr(), label.ptr(), next.ptr());
    if (id == nullptr) throw py::error_already_set();
    ids[i] = PyLong_AsLongLong(id);
    previous = std::move(label);
  }
  check_still(labels, n, what);
}

// Flags from a sequence of bools (Python's, numpy's, or ints 0 and 1).
void flags(py::handle values_obj, py::handle out_obj, const std::string& name,
           const std::string& op) {
  Borrowed out(out_obj, op.c_str(), name.c_str());
  const std::string what = op + ": " + name;
  check_cpu_array(*out, DType::kBool, 1);
  py::object values = py::reinterpret_steal<py::object>(
      PySequence_Fast(values_obj.ptr(), (what + ": expected a sequence").c_str()));
  if (!values) throw py::error_already_set();
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(values.ptr());
  check_size(*out, 0, n);
  uint8_t* flag = out->ptr<uint8_t>();
  for (Py_ssize_t i = 0; i < n; ++i) {
    check_still(values, n, what);
    PyObject* item = PySequence_Fast_GET_ITEM(values.ptr(), i);
    if (item == Py_True || item == Py_False) {
      flag[i] = item == Py_True;
      continue;
    }
    const auto value = py::reinterpret_borrow<py::object>(item);
    if (!PyNumber_Check(item)) {
      throw py::type_error(what + ": expected bools, but entry " + std::to_string(i) + " is a " +
                           Py_TYPE(item)->tp_name);
    }
    const int truth = PyObject_IsTrue(item);
    if (truth < 0) throw py::error_already_set();
    flag[i] = static_cast<uint8_t>(truth);
  }
}

}  // namespace

void bind_advantage(py::module_& m) {
  m.def("group_advantage", &group_advantage, py::arg("rewards"), py::arg("group_ids"),
        py::arg("is_last_step"), py::arg("mask"), py::arg("cu_seqlens"),
        py::arg("rewards_are_ragged"), py::arg("estimator"), py::arg("out"),
        py::arg("num_threads"));
  m.def("dense_ids", &dense_ids, py::arg("labels"), py::arg("out"), py::arg("op") = kOp,
        py::arg("name") = "group_ids");
  m.def("flags", &flags, py::arg("values"), py::arg("out"), py::arg("name"), py::arg("op") = kOp);
}

}  // namespace skyrl_fast
