// Borrowing torch tensors and numpy arrays through DLPack. Only csrc/bindings/ sees Python.
#pragma once

#include <pybind11/pybind11.h>

#include "tensor.h"

namespace skyrl_fast {

namespace py = pybind11;

// A TensorView of `object` for as long as this lives. torch >= 2.10 is read through its C exchange
// table (no Python call); anything else with __dlpack__ through a capsule; read-only numpy arrays
// through the buffer protocol. Throws TypeError naming op and argument for anything else.
class Borrowed {
 public:
  Borrowed(py::handle object, const char* op, const char* name);
  ~Borrowed();
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  const TensorView& operator*() const { return view_; }
  const TensorView* operator->() const { return &view_; }

 private:
  bool from_exchange_table(py::handle object);
  bool from_capsule(py::handle object);
  bool from_buffer(py::handle object);

  TensorView view_;
  py::object owner_;
  Py_buffer buffer_{};
  bool has_buffer_ = false;
};

}  // namespace skyrl_fast
