// Reading Python lists of numbers: a loop over exact ints and floats, and a slow path for the
// rest.
#include "bindings/python_lists.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace skyrl_fast {
namespace {

// Elements are small objects all over the heap: their headers are prefetched this far ahead.
constexpr int64_t kPrefetchAhead = 96;

#if defined(__GNUC__)
inline void prefetch(const void* address) { __builtin_prefetch(address); }
#else
inline void prefetch(const void*) {}
#endif

// An int of one 30-bit digit, and its value. CPython keeps both behind the header: the sign in the
// size up to 3.11, in a tag from 3.12 on (there the public API reads it). Other interpreters
// return false, and their ints take the slow path. Only for objects that pass PyLong_CheckExact.
inline bool has_one_digit(PyObject* number) {
#if defined(PYPY_VERSION) || defined(GRAALVM_PYTHON)
  (void)number;
  return false;
#elif PY_VERSION_HEX >= 0x030C0000
  return PyUnstable_Long_IsCompact(reinterpret_cast<const PyLongObject*>(number)) != 0;
#else
  return static_cast<size_t>(Py_SIZE(number) + 1) <= 2;
#endif
}

inline int64_t one_digit_value(PyObject* number) {
#if defined(PYPY_VERSION) || defined(GRAALVM_PYTHON)
  (void)number;
  return 0;
#elif PY_VERSION_HEX >= 0x030C0000
  return PyUnstable_Long_CompactValue(reinterpret_cast<const PyLongObject*>(number));
#else
  return static_cast<int64_t>(Py_SIZE(number)) *
         reinterpret_cast<const PyLongObject*>(number)->ob_digit[0];
#endif
}

inline bool small_int(PyObject* item, int64_t* value) {
  if (!PyLong_CheckExact(item) || !has_one_digit(item)) return false;
  *value = one_digit_value(item);
  return true;
}

// Four at a time: one branch for all of them, and their loads overlap.
inline bool four_small_ints(PyObject* a, PyObject* b, PyObject* c, PyObject* d) {
  const bool ints =
      PyLong_CheckExact(a) & PyLong_CheckExact(b) & PyLong_CheckExact(c) & PyLong_CheckExact(d);
  if (!ints) return false;
  return has_one_digit(a) & has_one_digit(b) & has_one_digit(c) & has_one_digit(d);
}

inline bool four_floats(PyObject* a, PyObject* b, PyObject* c, PyObject* d) {
  return PyFloat_CheckExact(a) & PyFloat_CheckExact(b) & PyFloat_CheckExact(c) &
         PyFloat_CheckExact(d);
}

// On a build without a GIL the list is locked instead, so that no other thread shrinks it.
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
  // Ctrl-C while the item's code ran is not an error of the item.
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0) {
    throw py::error_already_set();
  }
  PyErr_Clear();
  throw py::type_error(place.at(position) + ": expected " + wanted + ", got " + describe(item));
}

std::string bounds_text(Bounds bounds) {
  return "an integer from " + std::to_string(bounds.low) + " to " + std::to_string(bounds.high);
}

[[noreturn]] void refuse_value(const ListPlace& place, int64_t position, Bounds bounds,
                               PyObject* item) {
  throw std::invalid_argument(place.at(position) + ": expected " + bounds_text(bounds) + ", got " +
                              describe(item));
}

bool is_bool(PyObject* item) {
  if (PyBool_Check(item)) return true;
  const char* type = Py_TYPE(item)->tp_name;
  return std::strcmp(type, "numpy.bool") == 0 || std::strcmp(type, "numpy.bool_") == 0;
}

// Converts any object that Python accepts as an integer; may run Python code.
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

// How many of the first n items are the first object itself, in full blocks: masks and
// rewards are mostly runs of one object.
inline int64_t run_of_one_object(PyObject* const* items, int64_t n) {
  constexpr int64_t kBlock = 8;
  if (n < kBlock || items[kBlock - 1] != items[0]) return 0;
  const uintptr_t first = reinterpret_cast<uintptr_t>(items[0]);
  int64_t run = 0;
  for (; run + kBlock <= n; run += kBlock) {
    uintptr_t others = 0;
    for (int64_t k = 0; k < kBlock; ++k) {
      others |= reinterpret_cast<uintptr_t>(items[run + k]) ^ first;
    }
    if (others != 0) break;
  }
  return run;
}

// `times` Py_INCREFs at once, without a chain of dependent additions.
inline void add_references(PyObject* item, int64_t times) {
#if defined(Py_GIL_DISABLED) || defined(PYPY_VERSION) || defined(GRAALVM_PYTHON)
  for (int64_t i = 0; i < times; ++i) Py_INCREF(item);
#else
  if (times == 1) return Py_INCREF(item);
  Py_SET_REFCNT(item, Py_REFCNT(item) + times);  // leaves immortal objects alone
#endif
}

// Reads items[begin:n] by read_run(i, run) for runs of one object, read_four(i) and read_one(i),
// which return false for items they cannot read; returns where it stopped.
template <typename ReadRun, typename ReadFour, typename ReadOne>
int64_t read_items(PyObject* const* items, int64_t begin, int64_t n, const ReadRun& read_run,
                   const ReadFour& read_four, const ReadOne& read_one) {
  int64_t i = begin;
  while (i + 4 <= n) {
    const int64_t run = run_of_one_object(items + i, n - i);
    if (run > 0) {
      if (!read_run(i, run)) break;
      i += run;
      continue;
    }
    if (i + kPrefetchAhead + 4 <= n) {
      for (int k = 0; k < 4; ++k) prefetch(items[i + kPrefetchAhead + k]);
    }
    if (!read_four(i)) break;
    i += 4;
  }
  while (i < n && read_one(i)) ++i;
  return i;
}

// Reads items[begin:n] up to the first that is no exact small int; returns where it stopped.
template <typename Out>
int64_t read_small_ints(PyObject* const* items, int64_t begin, int64_t n, Out* out, Bounds bounds,
                        bool* good) {
  int64_t least = std::numeric_limits<int64_t>::max();
  int64_t most = std::numeric_limits<int64_t>::min();
  const auto write = [&](int64_t at, int64_t size, int64_t value) {
    std::fill_n(out + at, size, static_cast<Out>(value));
    least = std::min(least, value);
    most = std::max(most, value);
  };
  const auto read_run = [&](int64_t at, int64_t size) {
    int64_t value = 0;
    if (!small_int(items[at], &value)) return false;
    write(at, size, value);
    return true;
  };
  const auto read_four = [&](int64_t at) {
    PyObject *a = items[at], *b = items[at + 1], *c = items[at + 2], *d = items[at + 3];
    if (!four_small_ints(a, b, c, d)) return false;
    const int64_t values[4] = {one_digit_value(a), one_digit_value(b), one_digit_value(c),
                               one_digit_value(d)};
    for (int k = 0; k < 4; ++k) write(at + k, 1, values[k]);
    return true;
  };
  const auto read_one = [&](int64_t at) {
    int64_t value = 0;
    if (!small_int(items[at], &value)) {
      if (sizeof(Out) > 1 || !PyBool_Check(items[at])) return false;
      value = items[at] == Py_True;
    }
    write(at, 1, value);
    return true;
  };
  const int64_t end = read_items(items, begin, n, read_run, read_four, read_one);
  *good &= end == begin || (least >= bounds.low && most <= bounds.high);
  return end;
}

// Reads items[begin:n] up to the first that is no exact float, exact small int or bool.
int64_t read_floats(PyObject* const* items, int64_t begin, int64_t n, float* out) {
  const auto number = [](PyObject* item, float* value) {
    int64_t integer = 0;
    if (PyFloat_CheckExact(item)) {
      *value = static_cast<float>(PyFloat_AS_DOUBLE(item));
    } else if (small_int(item, &integer)) {
      *value = static_cast<float>(integer);
    } else if (PyBool_Check(item)) {
      *value = item == Py_True ? 1.0f : 0.0f;
    } else {
      return false;
    }
    return true;
  };
  const auto read_run = [&](int64_t at, int64_t size) {
    float value = 0.0f;
    if (!number(items[at], &value)) return false;
    std::fill_n(out + at, size, value);
    return true;
  };
  const auto read_four = [&](int64_t at) {
    PyObject *a = items[at], *b = items[at + 1], *c = items[at + 2], *d = items[at + 3];
    double values[4];
    if (four_floats(a, b, c, d)) {
      values[0] = PyFloat_AS_DOUBLE(a);
      values[1] = PyFloat_AS_DOUBLE(b);
      values[2] = PyFloat_AS_DOUBLE(c);
      values[3] = PyFloat_AS_DOUBLE(d);
    } else if (four_small_ints(a, b, c, d)) {
      values[0] = static_cast<double>(one_digit_value(a));
      values[1] = static_cast<double>(one_digit_value(b));
      values[2] = static_cast<double>(one_digit_value(c));
      values[3] = static_cast<double>(one_digit_value(d));
    } else {
      return false;
    }
    for (int k = 0; k < 4; ++k) out[at + k] = static_cast<float>(values[k]);
    return true;
  };
  const auto read_one = [&](int64_t at) { return number(items[at], out + at); };
  return read_items(items, begin, n, read_run, read_four, read_one);
}

// How many of the first n are the same object or exact small ints of one value.
int64_t equal_small_ints(PyObject* const* a, PyObject* const* b, int64_t n) {
  constexpr int64_t kBlock = 64;
  int64_t i = 0;
  while (i < n) {
    const int64_t end = std::min(n, i + kBlock);
    if (std::memcmp(a + i, b + i, (end - i) * sizeof(*a)) == 0) {
      i = end;
      continue;
    }
    for (; i < end; ++i) {
      if (i + kPrefetchAhead < n) {
        prefetch(a[i + kPrefetchAhead]);
        prefetch(b[i + kPrefetchAhead]);
      }
      int64_t left = 0, right = 0;
      if (a[i] == b[i]) continue;
      if (!small_int(a[i], &left) || !small_int(b[i], &right) || left != right) return i;
    }
  }
  return n;
}

bool equal_ids(PyObject* a, PyObject* b, const ListPlace& place_a, int64_t position_a,
               const ListPlace& place_b, int64_t position_b) {
  const py::object left = py::reinterpret_borrow<py::object>(a);
  const py::object right = py::reinterpret_borrow<py::object>(b);
  return careful_number<int64_t>(left.ptr(), Bounds{}, place_a, position_a) ==
         careful_number<int64_t>(right.ptr(), Bounds{}, place_b, position_b);
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
  throw std::invalid_argument(place.at(0) + " and on: expected " + bounds_text(bounds));
}

template <typename Out>
void read_numbers(PyObject* list, int64_t size, Out* out, Bounds bounds, const ListPlace& place) {
  bool good = true;
  int64_t i = 0;
  while (true) {
    // Checked again after each slow element: it may have run Python code.
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

int64_t common_prefix_of_lists(const ListPart& a, const ListPart& b, int64_t n) {
  ListLock lock_a(a.list), lock_b(b.list);
  int64_t i = 0;
  while (i < n) {
    // Read again after each slow pair: comparing them may have run Python code.
    if (list_size(a.list) < a.begin + n || list_size(b.list) < b.begin + n) {
      throw std::invalid_argument(a.place.at(a.begin + i) +
                                  ": the list became shorter during the call; another thread must "
                                  "not change it meanwhile");
    }
    PyObject* const* left = PySequence_Fast_ITEMS(a.list) + a.begin;
    PyObject* const* right = PySequence_Fast_ITEMS(b.list) + b.begin;
    i += equal_small_ints(left + i, right + i, n - i);
    if (i >= n) break;
    int64_t value = 0;
    if (small_int(left[i], &value) && small_int(right[i], &value)) break;  // and they differ
    if (!equal_ids(left[i], right[i], a.place, a.begin + i, b.place, b.begin + i)) break;
    ++i;
  }
  return i;
}

int64_t shared_beginning(PyObject* a, PyObject* b) {
  const int64_t n = std::min(list_size(a), list_size(b));
  PyObject* const* left = PySequence_Fast_ITEMS(a);
  PyObject* const* right = PySequence_Fast_ITEMS(b);
  constexpr int64_t kBlock = 64;
  int64_t i = 0;
  while (i + kBlock <= n && std::memcmp(left + i, right + i, kBlock * sizeof(*left)) == 0) {
    i += kBlock;
  }
  while (i < n && left[i] == right[i]) ++i;
  return std::max<int64_t>(0, i);
}

bool read_plain_list(PyObject* list, int64_t size, DType dtype, void* out, Bounds bounds,
                     int64_t done) {
  if (list_size(list) != size) return false;
  PyObject* const* items = PySequence_Fast_ITEMS(list);
  bool good = true;
  const auto ints = [&](auto* typed) {
    return read_small_ints(items, done, size, typed, bounds, &good) == size && good;
  };
  switch (dtype) {
    case DType::kUInt8: return ints(static_cast<uint8_t*>(out));
    case DType::kInt16: return ints(static_cast<int16_t*>(out));
    case DType::kInt32: return ints(static_cast<int32_t*>(out));
    case DType::kInt64: return ints(static_cast<int64_t*>(out));
    case DType::kFloat32: return read_floats(items, done, size, static_cast<float*>(out)) == size;
    default: return false;
  }
}

py::object join_list_pieces(const std::vector<ListPiece>& pieces, int64_t length,
                            PyObject* filler) {
  py::object joined = py::reinterpret_steal<py::object>(PyList_New(length));
  if (!joined) throw py::error_already_set();
  PyObject** out = PySequence_Fast_ITEMS(joined.ptr());
  int64_t at = 0;
  bool numbers = true;
  const auto put = [&](PyObject* item, int64_t times) {
    numbers &= PyLong_CheckExact(item) || PyFloat_CheckExact(item) || PyBool_Check(item);
    add_references(item, times);
    std::fill_n(out + at, times, item);
    at += times;
  };
  const auto fill_until = [&](int64_t end) {
    if (at < end) put(filler, end - at);
  };
  for (const ListPiece& piece : pieces) {
    fill_until(piece.start);
    PyObject* list = piece.part.list;
    ListLock lock(list);
    const int64_t end = piece.part.begin + piece.size;
    if (list_size(list) < end) {
      throw std::invalid_argument(piece.part.place.at(list_size(list)) +
                                  ": the list became shorter during the call; another thread must "
                                  "not change it meanwhile");
    }
    PyObject* const* items = PySequence_Fast_ITEMS(list);
    for (int64_t i = piece.part.begin; i < end;) {
      prefetch(items[i + kPrefetchAhead < end ? i + kPrefetchAhead : i]);
      const int64_t run = std::max<int64_t>(1, run_of_one_object(items + i, end - i));
      put(items[i], run);
      i += run;
    }
  }
  fill_until(length);
#if !defined(Py_GIL_DISABLED)
  // Numbers hold no references: the garbage collector need not walk millions of them again and
  // again.
  if (numbers) PyObject_GC_UnTrack(joined.ptr());
#else
  (void)numbers;
#endif
  return joined;
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
