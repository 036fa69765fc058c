// Reading Python lists of numbers into arrays, each object touched once.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "pack/pack.h"

namespace skyrl_fast {

namespace py = pybind11;

// The list being read, for messages: "pad_steps: field 'tokens', row 3, position 5 ...".
struct ListPlace {
  const char* op = "";
  const char* field = "";
  int64_t row = 0;

  std::string at(int64_t position) const;
};

// With the GIL: writes the `size` numbers of a list or tuple to `out` of `dtype` (uint8, int16,
// int32, int64, float32). Accepts ints, floats (into float32 only), bools (not into int32 and
// int64: a bool is no id) and numpy scalars. Throws TypeError for anything else, ValueError for an
// integer out of `bounds` or a list whose size changed; the contents of `out` are then undefined.
void read_number_list(PyObject* list, int64_t size, DType dtype, void* out, Bounds bounds,
                      const ListPlace& place);

// The same for a list of only exact small ints and floats (and bools where they are accepted), all
// within the bounds; for any other list returns false with `out` undefined. Runs no Python code:
// any thread may call it, as long as some thread holds the GIL and runs no Python. The first `done`
// numbers are in `out` already.
bool read_plain_list(PyObject* list, int64_t size, DType dtype, void* out, Bounds bounds,
                     int64_t done);

// How many of the first items of two lists are the same objects, compared by address: their numbers
// are then equal. Runs no Python code, like `read_plain_list`.
int64_t shared_beginning(PyObject* a, PyObject* b);

// A list or tuple of ints from `begin` on.
struct ListPart {
  PyObject* list = nullptr;
  int64_t begin = 0;
  ListPlace place;
};

// How many of the first n ids of two lists are equal. The same object in both, as in a growing
// context, counts as equal without being read. Throws TypeError for an id that is no integer.
int64_t common_prefix_of_lists(const ListPart& a, const ListPart& b, int64_t n);

// `size` items of a list or tuple, and where they go in another list.
struct ListPiece {
  ListPart part;
  int64_t size = 0;
  int64_t start = 0;
};

// A new list of `length` items: the pieces, in order of their starts, and `filler` between them.
py::object join_list_pieces(const std::vector<ListPiece>& pieces, int64_t length, PyObject* filler);

// Prefetches the memory of the list itself; a hint.
void prefetch_list(PyObject* list);

// "int", "float" or "bool" by the Python type of one element, null if it is no number.
const char* number_kind(PyObject* item);

// The size of a list or tuple, -1 for anything else.
inline int64_t list_size(PyObject* object) {
  return PyList_Check(object)    ? PyList_GET_SIZE(object)
         : PyTuple_Check(object) ? PyTuple_GET_SIZE(object)
                                 : -1;
}

}  // namespace skyrl_fast
