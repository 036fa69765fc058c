// Ragged rows from Python.
#include "bindings/rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace skyrl_fast {
namespace {

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

int64_t size_or_zero(DType dtype) { return dtype == DType::kOther ? 0 : element_size(dtype); }

}  // namespace

Rows::Rows(std::string op, std::string field, py::handle rows)
    : op_(std::move(op)), field_(std::move(field)) {
  py::object sequence = py::reinterpret_steal<py::object>(PySequence_Fast(rows.ptr(), ""));
  if (!sequence || PyUnicode_Check(rows.ptr()) || PyBytes_Check(rows.ptr())) {
    PyErr_Clear();
    throw py::type_error(where() + ": expected a list of rows, got " + type_name(rows));
  }
  // The list itself may change while a row's buffer is requested: read its size and items each
  // time.
  rows_.reserve(PySequence_Fast_GET_SIZE(sequence.ptr()));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.ptr()); ++i) {
    add(py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(sequence.ptr(), i)));
  }
  if (ran_python_) borrow_again();
}

// Takes the addresses of array rows late: code of other rows may have moved or freed their memory.
void Rows::borrow_again() {
  size_t array = 0;
  for (int64_t i = 0; i < num_rows(); ++i) {
    if (rows_[i].list) continue;
    auto borrowed = std::make_unique<Borrowed>(owners_[array], op_.c_str(), field_.c_str());
    const TensorView& view = **borrowed;
    const bool same = view.ndim == 1 && view.shape[0] == rows_[i].size &&
                      view.dtype == rows_[i].array.dtype && view.device == Device::kCpu;
    if (!same) {
      throw std::invalid_argument(where() + ", row " + std::to_string(i) +
                                  " must not change while the rows are read");
    }
    rows_[i].array = ArrayRow{view.data, view.shape[0], view.stride[0], view.dtype};
    borrowed_[array++] = std::move(borrowed);
  }
}

Rows::Rows(std::string op, std::string field, py::handle values, py::handle cu_seqlens)
    : op_(std::move(op)), field_(std::move(field)) {
  borrowed_.push_back(std::make_unique<Borrowed>(values, op_.c_str(), field_.c_str()));
  const TensorView& flat = **borrowed_.back();
  check_cpu(flat);
  check_ndim(flat, 1);
  flat_owner_ = py::reinterpret_borrow<py::object>(values);
  Borrowed cu(cu_seqlens, op_.c_str(), "cu_seqlens");
  check_cpu(*cu);
  check_ndim(*cu, 1);
  if (cu->dtype != DType::kInt32 && cu->dtype != DType::kInt64) {
    fail(*cu, "int32 or int64", dtype_name(cu->dtype));
  }
  const auto offset = [&](int64_t i) -> int64_t {
    return cu->dtype == DType::kInt32 ? cu->ptr<int32_t>()[i * cu->stride[0]]
                                      : cu->ptr<int64_t>()[i * cu->stride[0]];
  };
  const int64_t num_offsets = cu->shape[0];
  if (num_offsets == 0) fail(*cu, "one offset more than rows", "no offset at all");
  if (offset(0) != 0 || offset(num_offsets - 1) != flat.shape[0]) {
    fail(*cu, "offsets from 0 to the " + std::to_string(flat.shape[0]) + " values of " + field_,
         "offsets from " + std::to_string(offset(0)) + " to " +
             std::to_string(offset(num_offsets - 1)));
  }
  rows_.reserve(num_offsets - 1);
  for (int64_t i = 0; i + 1 < num_offsets; ++i) {
    const int64_t begin = offset(i), end = offset(i + 1);
    if (begin < 0 || end < begin || end > flat.shape[0]) {
      fail(*cu, "non-decreasing offsets", "a step back at row " + std::to_string(i));
    }
    Row row;
    row.array.data =
        static_cast<const char*>(flat.data) + begin * flat.stride[0] * size_or_zero(flat.dtype);
    row.array.size = row.size = end - begin;
    row.array.stride = flat.stride[0];
    row.array.dtype = flat.dtype;
    rows_.push_back(std::move(row));
  }
  if (flat.dtype == DType::kOther) fail(flat, "integers or floats", dtype_name(flat.dtype));
}

void Rows::lengths(py::handle out_obj) const {
  Borrowed out(out_obj, op_.c_str(), "lengths");
  check_cpu_array(*out, DType::kInt64, 1);
  check_size(*out, 0, num_rows());
  for (int64_t i = 0; i < num_rows(); ++i) out->ptr<int64_t>()[i] = rows_[i].size;
}

py::object Rows::kind() const {
  for (const Row& row : rows_) {
    if (row.size == 0) continue;
    if (row.list) {
      if (list_size(row.list.ptr()) <= 0) continue;
      const char* kind = number_kind(PySequence_Fast_GET_ITEM(row.list.ptr(), 0));
      return kind == nullptr ? py::object(py::str("int")) : py::object(py::str(kind));
    }
    if (row.array.dtype == DType::kBool) return py::str("bool");
    if (row.array.dtype == DType::kUInt8) return py::str("uint8");
    return py::str(is_floating(row.array.dtype) ? "float" : "int");
  }
  return py::none();
}

void Rows::check_convertible(DType out) const {
  const bool is_id = out == DType::kInt32 || out == DType::kInt64;
  for (int64_t i = 0; i < num_rows(); ++i) {
    if (rows_[i].list || rows_[i].size == 0) continue;
    const DType in = rows_[i].array.dtype;
    if (out == DType::kFloat32 && (is_integer(in) || is_floating(in))) continue;
    if (out != DType::kFloat32 && is_integer(in) && !(is_id && in == DType::kBool)) continue;
    throw py::type_error(where() + ", row " + std::to_string(i) + ": expected " +
                         (out == DType::kFloat32 ? "numbers" : "integers") + ", got " +
                         dtype_name(in));
  }
}

bool Rows::read_plain(int64_t row, DType dtype, void* out, Bounds bounds,
                      const void* before) const {
  if (!rows_[row].list) return true;
  const int64_t ahead = row + 4 < num_rows() ? row + 4 : row;
  __builtin_prefetch(rows_[ahead].list.ptr());
  if (row + 1 < num_rows() && rows_[row + 1].list) prefetch_list(rows_[row + 1].list.ptr());
  int64_t done = 0;
  if (before != nullptr && rows_[row - 1].list) {
    done = shared_beginning(rows_[row - 1].list.ptr(), rows_[row].list.ptr());
    done = std::min(done, rows_[row].size);
    std::memcpy(out, before, done * element_size(dtype));
  }
  return read_plain_list(rows_[row].list.ptr(), rows_[row].size, dtype, out, bounds, done);
}

void Rows::read_list(int64_t row, DType dtype, void* out, Bounds bounds) const {
  if (!rows_[row].list) return;
  read_number_list(rows_[row].list.ptr(), rows_[row].size, dtype, out, bounds,
                   ListPlace{op_.c_str(), field_.c_str(), row});
}

int64_t Rows::copy_array(int64_t row, DType dtype, void* out, Bounds bounds) const {
  if (rows_[row].list) return -1;
  return copy_row_cpu(rows_[row].array, dtype, out, bounds);
}

void Rows::refuse(int64_t row, int64_t position, Bounds bounds) const {
  throw std::invalid_argument(ListPlace{op_.c_str(), field_.c_str(), row}.at(position) +
                              ": expected an integer from " + std::to_string(bounds.low) + " to " +
                              std::to_string(bounds.high));
}

void Rows::add(py::object object) {
  if (list_size(object.ptr()) < 0) {
    if (add_array(&object)) return;
    if (PyUnicode_Check(object.ptr()) || PyBytes_Check(object.ptr()) ||
        PyDict_Check(object.ptr()) || !PySequence_Check(object.ptr())) {
      throw py::type_error(where() + ", row " + std::to_string(num_rows()) +
                           ": expected a list of numbers or a 1-D array, got " + type_name(object));
    }
    object = py::list(object);
    ran_python_ = true;
  }
  Row row;
  row.size = list_size(object.ptr());
  row.list = std::move(object);
  rows_.push_back(std::move(row));
  ++num_lists_;
}

// Adds a 1-D array that can be borrowed; false for any other object. An array of a dtype that
// no kernel reads (uint16, uint64) is replaced by its list.
bool Rows::add_array(py::object* object_ptr) {
  py::object& object = *object_ptr;
  const bool is_array = (PyObject_CheckBuffer(object.ptr()) && !PyBytes_Check(object.ptr())) ||
                        py::hasattr(object, "__dlpack__");
  if (!is_array) return false;
  auto borrowed = std::make_unique<Borrowed>(object, op_.c_str(), field_.c_str());
  const TensorView& view = **borrowed;
  if (view.device != Device::kCpu || view.ndim != 1) {
    throw std::invalid_argument(where() + ", row " + std::to_string(num_rows()) +
                                ": expected a 1-D array on the CPU, got shape " +
                                view.shape_string());
  }
  if (view.dtype == DType::kOther) {
    if (!py::hasattr(object, "tolist")) return false;
    object = object.attr("tolist")();
    ran_python_ = true;
    return false;
  }
  Row row;
  row.array = ArrayRow{view.data, view.shape[0], view.stride[0], view.dtype};
  row.size = view.shape[0];
  rows_.push_back(std::move(row));
  borrowed_.push_back(std::move(borrowed));
  owners_.push_back(std::move(object));
  return true;
}

}  // namespace skyrl_fast
