// Borrowing torch tensors and numpy arrays through DLPack. Only csrc/bindings/ sees Python.
#pragma once

#include <pybind11/pybind11.h>

#include "core/tensor.h"

namespace skyrl_fast {

namespace py = pybind11;

// pybind11's types have hidden visibility; so must classes that hold them.
#if defined(__GNUC__)
#define SKYRL_HIDDEN __attribute__((visibility("hidden")))
#else
#define SKYRL_HIDDEN
#endif

// A TensorView of `object`, valid for the lifetime of this. numpy arrays are read through the
// buffer protocol, torch >= 2.10 through its C exchange table (no Python call), anything else with
// __dlpack__ through a capsule. Throws TypeError naming op and argument for anything else.
class SKYRL_HIDDEN Borrowed {
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
