// Reading Python lists of numbers: a loop over exact ints and floats, and a careful path for the
// rest.
#include "bindings/python_lists.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace skyrl_fast {
namespace {

// Elements are small objects all over the heap: their headers are asked for this far ahead.
constexpr int64_t kPrefetchAhead = 24;

#if defined(__GNUC__)
inline void prefetch(const void* address) { __builtin_prefetch(address); }
#else
inline void prefetch(const void*) {}
#endif

// The value of an exact int of one 30-bit digit. CPython stores it behind the header: with the
// sign in the size up to 3.11, with a tag from 3.12 on (there the public API reads it). Other
// interpreters and multi-digit ints take the careful path.
inline bool small_int(PyObject* item, int64_t* value) {
  if (!PyLong_CheckExact(item)) return false;
#if defined(PYPY_VERSION) || defined(GRAALVM_PYTHON)
  (void)value;
  return false;
#elif PY_VERSION_HEX >= 0x030C0000
  const auto* number = reinterpret_cast<const PyLongObject*>(item);
  if (!PyUnstable_Long_IsCompact(number)) return false;
  *value = PyUnstable_Long_CompactValue(number);
  return true;
#else
  const auto* number = reinterpret_cast<const PyLongObject*>(item);
  const Py_ssize_t signed_digits = Py_SIZE(item);
  if (static_cast<size_t>(signed_digits + 1) > 2) return false;
  *value = static_cast<int64_t>(signed_digits) * number->ob_digit[0];
  return true;
#endif
}

// On a build without a GIL the list is locked instead, so that nobody shrinks it meanwhile.
class ListLock {
 public:
#if defined(Py_GIL_DISABLED)
  explicit ListLock(PyObject* list) { PyCriticalSection_Begin(&section_, list); }
  ~ListLock() { PyCriticalSection_End(&section_); }

 private:
  PyCriticalSection section_;
#else
  explicit ListLock(PyObject*) {}
#endif
};

std::string describe(PyObject* item) {
  std::string text = Py_TYPE(item)->tp_name;
  py::object repr = py::reinterpret_steal<py::object>(PyObject_Repr(item));
  if (!repr) {
    PyErr_Clear();
    return text;
  }
  constexpr size_t kMostCharacters = 40;
  const std::string shown = py::str(repr);
  if (shown.size() <= kMostCharacters) text += " " + shown;
  return text;
}

[[noreturn]] void refuse_type(const ListPlace& place, int64_t position, const char* wanted,
                              PyObject* item) {
  PyErr_Clear();
  throw py::type_error(place.at(position) + " must be " + wanted + ", got " + describe(item));
}

std::string bounds_text(Bounds bounds) {
  return "an integer from " + std::to_string(bounds.low) + " to " + std::to_string(bounds.high);
}

[[noreturn]] void refuse_value(const ListPlace& place, int64_t position, Bounds bounds,
                               PyObject* item) {
  throw std::invalid_argument(place.at(position) + " must be " + bounds_text(bounds) + ", got " +
                              describe(item));
}

bool is_bool(PyObject* item) {
  if (PyBool_Check(item)) return true;
  const char* type = Py_TYPE(item)->tp_name;
  return std::strcmp(type, "numpy.bool") == 0 || std::strcmp(type, "numpy.bool_") == 0;
}

// An integer by any means Python has; may run Python code.
int64_t careful_int(PyObject* item, Bounds bounds, const ListPlace& place, int64_t position) {
  py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(item));
  if (!index) refuse_type(place, position, "an integer", item);
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || !bounds.contain(value)) refuse_value(place, position, bounds, item);
  return value;
}

template <typename Out>
Out careful_number(PyObject* item, Bounds bounds, const ListPlace& place, int64_t position) {
  constexpr bool kIsId = std::is_same_v<Out, int32_t> || std::is_same_v<Out, int64_t>;
  if (is_bool(item)) {
    if (kIsId) refuse_type(place, position, "an integer", item);
    return static_cast<Out>(PyObject_IsTrue(item));
  }
  if constexpr (std::is_same_v<Out, float>) {
    if (PyUnicode_Check(item) || PyBytes_Check(item))
      refuse_type(place, position, "a number", item);
    const double value = PyFloat_AsDouble(item);
    if (value == -1.0 && PyErr_Occurred() != nullptr) {
      if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        throw std::invalid_argument(place.at(position) + " must fit in a float, got a larger int");
      }
      refuse_type(place, position, "a number", item);
    }
    return static_cast<Out>(value);
  } else {
    return static_cast<Out>(careful_int(item, bounds, place, position));
  }
}

inline bool is_small_int(PyObject* item) {
  int64_t ignored = 0;
  return small_int(item, &ignored);
}

inline int64_t small_int_value(PyObject* item) {
  int64_t value = 0;
  small_int(item, &value);
  return value;
}

// Reads items[begin:n] up to the first that is no exact small int; returns where it stopped. Four
// at a time: one branch for all, and their loads overlap.
template <typename Out>
int64_t read_small_ints(PyObject* const* items, int64_t begin, int64_t n, Out* out, Bounds bounds,
                        bool* good) {
  int64_t least = bounds.low, most = bounds.high;  // of the values: in bounds as long as these are
  int64_t i = begin;
  for (; i + kPrefetchAhead + 4 <= n; i += 4) {
    int64_t value[4];
    int all_small = 1;
    for (int k = 0; k < 4; ++k) prefetch(items[i + kPrefetchAhead + k]);
    for (int k = 0; k < 4; ++k) all_small &= is_small_int(items[i + k]);
    if (!all_small) break;
    for (int k = 0; k < 4; ++k) {
      value[k] = small_int_value(items[i + k]);
      out[i + k] = static_cast<Out>(value[k]);
      least = std::min(least, value[k]);
      most = std::max(most, value[k]);
    }
  }
  for (; i < n; ++i) {
    int64_t value = 0;
    if (!small_int(items[i], &value)) {
      if (sizeof(Out) > 1 || !PyBool_Check(items[i])) break;
      value = items[i] == Py_True;
    }
    out[i] = static_cast<Out>(value);
    least = std::min(least, value);
    most = std::max(most, value);
  }
  *good &= least >= bounds.low && most <= bounds.high;
  return i;
}

inline bool all_floats(PyObject* const* items) {
  int all = 1;
  for (int k = 0; k < 4; ++k) all &= PyFloat_CheckExact(items[k]);
  return all != 0;
}

inline bool all_small_ints(PyObject* const* items) {
  int all = 1;
  for (int k = 0; k < 4; ++k) all &= is_small_int(items[k]);
  return all != 0;
}

// Reads items[begin:n] up to the first that is no exact float, exact small int or bool.
int64_t read_floats(PyObject* const* items, int64_t begin, int64_t n, float* out) {
  int64_t i = begin;
  for (; i + kPrefetchAhead + 4 <= n; i += 4) {
    for (int k = 0; k < 4; ++k) prefetch(items[i + kPrefetchAhead + k]);
    if (all_floats(items + i)) {
      for (int k = 0; k < 4; ++k) out[i + k] = static_cast<float>(PyFloat_AS_DOUBLE(items[i + k]));
    } else if (all_small_ints(items + i)) {
      for (int k = 0; k < 4; ++k) out[i + k] = static_cast<float>(small_int_value(items[i + k]));
    } else {
      break;
    }
  }
  for (; i < n; ++i) {
    PyObject* item = items[i];
    int64_t value = 0;
    if (PyFloat_CheckExact(item)) {
      out[i] = static_cast<float>(PyFloat_AS_DOUBLE(item));
    } else if (small_int(item, &value)) {
      out[i] = static_cast<float>(value);
    } else if (PyBool_Check(item)) {
      out[i] = item == Py_True ? 1.0f : 0.0f;
    } else {
      return i;
    }
  }
  return n;
}

[[noreturn]] void refuse_first_out_of_bounds(PyObject* list, Bounds bounds,
                                             const ListPlace& place) {
  PyObject* const* items = PySequence_Fast_ITEMS(list);
  for (int64_t i = 0; i < list_size(list); ++i) {
    int64_t value = 0;
    if (small_int(items[i], &value) && !bounds.contain(value)) {
      refuse_value(place, i, bounds, items[i]);
    }
  }
  throw std::invalid_argument(place.at(0) + " and on must be " + bounds_text(bounds));
}

template <typename Out>
void read_numbers(PyObject* list, int64_t size, Out* out, Bounds bounds, const ListPlace& place) {
  bool good = true;
  int64_t i = 0;
  while (true) {
    // Checked again after each careful element: that may have run Python code.
    if (list_size(list) != size) {
      throw std::invalid_argument(place.at(i) + ": the list was " + std::to_string(size) +
                                  " long when the call began and is now " +
                                  std::to_string(list_size(list)) +
                                  "; another thread must not change it meanwhile");
    }
    if (i >= size) break;
    PyObject* const* items = PySequence_Fast_ITEMS(list);
    if constexpr (std::is_same_v<Out, float>) {
      i = read_floats(items, i, size, out);
    } else {
      i = read_small_ints(items, i, size, out, bounds, &good);
    }
    if (i >= size) break;
    py::object item = py::reinterpret_borrow<py::object>(items[i]);
    out[i] = careful_number<Out>(item.ptr(), bounds, place, i);
    ++i;
  }
  if (!good) refuse_first_out_of_bounds(list, bounds, place);
}

}  // namespace

std::string ListPlace::at(int64_t position) const {
  return std::string(op) + ": " + field + ", row " + std::to_string(row) + ", position " +
         std::to_string(position);
}

void read_number_list(PyObject* list, int64_t size, DType dtype, void* out, Bounds bounds,
                      const ListPlace& place) {
  ListLock lock(list);
  switch (dtype) {
    case DType::kUInt8: return read_numbers(list, size, static_cast<uint8_t*>(out), bounds, place);
    case DType::kInt16: return read_numbers(list, size, static_cast<int16_t*>(out), bounds, place);
    case DType::kInt32: return read_numbers(list, size, static_cast<int32_t*>(out), bounds, place);
    case DType::kInt64: return read_numbers(list, size, static_cast<int64_t*>(out), bounds, place);
    case DType::kFloat32: return read_numbers(list, size, static_cast<float*>(out), bounds, place);
    default: throw std::logic_error("read_number_list: a dtype that no caller should ask for");
  }
}

void prefetch_list(PyObject* list) {
  if (list_size(list) <= 0) return;
  PyObject* const* items = PySequence_Fast_ITEMS(list);
  constexpr int64_t kPointersPerLine = 8;
  for (int64_t line = 0; line < 4; ++line) prefetch(items + line * kPointersPerLine);
}

const char* number_kind(PyObject* item) {
  if (is_bool(item)) return "bool";
  if (PyFloat_Check(item)) return "float";
  if (PyIndex_Check(item)) return "int";
  PyNumberMethods* methods = Py_TYPE(item)->tp_as_number;
  return methods != nullptr && methods->nb_float != nullptr ? "float" : nullptr;
}

}  // namespace skyrl_fast
