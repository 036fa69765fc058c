// Ragged rows from Python: lists, tuples, 1-D arrays, or slices of one flat array.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/borrow.h"
#include "bindings/python_lists.h"
#include "pack/pack.h"

namespace skyrl_fast {

// One field's rows, kept alive. Throws TypeError or ValueError for anything that is not a row.
class SKYRL_HIDDEN Rows {
 public:
  Rows(std::string op, std::string field, py::handle rows);
  Rows(std::string op, std::string field, py::handle values, py::handle cu_seqlens);

  int64_t num_rows() const { return static_cast<int64_t>(rows_.size()); }
  const std::string& field() const { return field_; }
  bool any_list() const { return num_lists_ > 0; }
  bool any_array() const { return num_lists_ < num_rows(); }
  int64_t size(int64_t row) const { return rows_[row].size; }

  // Null where the row is an array; its memory is then `array(row)`.
  PyObject* list(int64_t row) const { return rows_[row].list.ptr(); }
  const ArrayRow& array(int64_t row) const { return rows_[row].array; }
  ListPlace place(int64_t row) const { return {op_.c_str(), field_.c_str(), row}; }

  void lengths(py::handle out) const;

  // "int", "uint8", "bool", "float" by the first element; None where every row is empty.
  py::object kind() const;

  // Checks that array rows can be converted to `out` without changing their meaning.
  void check_convertible(DType out) const;

  // Any thread may call it, while some thread holds the GIL and runs no Python. False: the row is a
  // list, but not of plain numbers within the bounds, and needs `read_list`. `before`: the output
  // of the previous row, read by this function with these bounds, or null. Contexts grow: the
  // common beginning of both lists is copied from there.
  bool read_plain(int64_t row, DType dtype, void* out, Bounds bounds, const void* before) const;

  // With the GIL; may run Python code. Throws for anything but numbers within the bounds.
  void read_list(int64_t row, DType dtype, void* out, Bounds bounds) const;

  // Needs no GIL. Returns the position of the first integer out of bounds, or -1.
  int64_t copy_array(int64_t row, DType dtype, void* out, Bounds bounds) const;

  [[noreturn]] void refuse(int64_t row, int64_t position, Bounds bounds) const;

 private:
  struct Row {
    py::object list;  // a list or tuple, else the row is an array
    ArrayRow array;
    int64_t size = 0;
  };

  std::string where() const { return op_ + ": " + field_; }
  void add(py::object object);
  bool add_array(py::object* object);
  void borrow_again();

  std::string op_, field_;
  std::vector<Row> rows_;
  std::vector<py::object> owners_;
  std::vector<std::unique_ptr<Borrowed>> borrowed_;
  py::object flat_owner_;
  int64_t num_lists_ = 0;
  bool ran_python_ = false;  // code of a later row, which may have changed an array's memory
};

}  // namespace skyrl_fast
