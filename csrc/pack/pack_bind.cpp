// The one call that writes ragged rows with their padding and masks, and the moves between layouts.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/borrow.h"
#include "bindings/ops.h"
#include "bindings/rows.h"
#include "core/parallel.h"
#include "pack/pack.h"

namespace skyrl_fast {
namespace {

constexpr int64_t kPatternBytes = 16;
constexpr int64_t kBytesPerUnit = 1 << 20;  // unit of work of a thread
constexpr int64_t kBytesForThreads = 8
                                     << 20;  // below this a second thread costs more than it saves
constexpr int64_t kBytesPerListItem = 40;    // read per item: a pointer and a small int

#if defined(Py_GIL_DISABLED)
constexpr bool kListsByAllThreads = false;  // without a GIL, other threads may change them
#else
constexpr bool kListsByAllThreads = true;
#endif

struct CopyJob {
  const Rows* rows;
  char* out;
  DType dtype;
  const int64_t* starts;
  Bounds bounds;

  void* place(int64_t row) const { return out + starts[row] * element_size(dtype); }
};

struct FillJob {
  void* out;
  DType dtype;
  PaddedLayout layout;
  bool is_mask;
  double value;
};

Bounds bounds_of(DType dtype, int64_t low, int64_t high) {
  const auto within = [&](int64_t least, int64_t most) {
    return Bounds{std::max(low, least), std::min(high, most)};
  };
  switch (dtype) {
    case DType::kUInt8: return within(0, 255);
    case DType::kInt16: return within(INT16_MIN, INT16_MAX);
    case DType::kInt32: return within(INT32_MIN, INT32_MAX);
    default: return Bounds{low, high};
  }
}

// Everything that one call writes, in three phases: plain lists are read by all threads while the
// caller holds the GIL and waits, so that no list can change; other lists are read by the caller;
// then array rows are copied and padding and masks filled, without the GIL.
class Fill {
 public:
  Fill(std::string op, const py::list& copies, const py::list& fills) : op_(std::move(op)) {
    for (py::handle item : copies) add_copy(py::cast<py::tuple>(item));
    for (py::handle item : fills) add_fill(py::cast<py::tuple>(item));
  }

  void run(int num_threads) {
    const int threads = total_bytes_ < kBytesForThreads ? 1 : std::max(1, num_threads);
    parallel_for(threads, threads, 1, [&](int64_t thread, int64_t) {
      if (thread == 0) {
        lead();  // on the caller's thread, which holds the GIL
      } else {
        if (kListsByAllThreads) work_on_lists();
        work();
      }
    });
    if (failure_) std::rethrow_exception(failure_);
    if (bad_copy_ >= 0) copies_[bad_copy_].rows->refuse(bad_row_, bad_position_, bad_bounds());
  }

 private:
  struct Unit {
    int64_t job;  // index into copies_, then fills_
    int64_t begin, end;
    bool is_done = false;  // for lists: all rows were plain
  };

  void lead() {
    try {
      read_lists();
      read_other_lists();
    } catch (...) {
      next_unit_ = static_cast<int64_t>(units_.size());  // start no more units
      throw;
    }
    py::gil_scoped_release release;
    work();
  }

  Bounds bad_bounds() const { return copies_[bad_copy_].bounds; }

  Borrowed& borrow(py::handle object, const char* name) {
    borrowed_.push_back(std::make_unique<Borrowed>(object, op_.c_str(), name));
    check_cpu(**borrowed_.back());
    check_contiguous(**borrowed_.back());
    return *borrowed_.back();
  }

  void add_units(std::vector<Unit>* units, int64_t job, int64_t num_rows, int64_t num_bytes) {
    total_bytes_ += num_bytes;
    if (num_rows == 0) return;
    const int64_t step = std::max<int64_t>(1, kBytesPerUnit / (num_bytes / num_rows + 1));
    for (int64_t begin = 0; begin < num_rows; begin += step) {
      units->push_back({job, begin, std::min(begin + step, num_rows), false});
    }
  }

  // (rows, out, starts, low, high)
  void add_copy(const py::tuple& job) {
    CopyJob copy;
    copy.rows = py::cast<const Rows*>(job[0]);
    const Borrowed& out = borrow(job[1], copy.rows->field().c_str());
    const Borrowed& starts = borrow(job[2], "starts");
    check_cpu_array(*starts, DType::kInt64, 1);
    check_size(*starts, 0, copy.rows->num_rows());
    copy.out = out->ptr<char>();
    copy.dtype = out->dtype;
    copy.starts = starts->ptr<int64_t>();
    copy.bounds = bounds_of(out->dtype, py::cast<int64_t>(job[3]), py::cast<int64_t>(job[4]));
    copy.rows->check_convertible(out->dtype);
    int64_t cells = 0;
    for (int64_t row = 0; row < copy.rows->num_rows(); ++row) {
      const int64_t size = copy.rows->size(row);
      if (copy.starts[row] < 0 || size > out->numel() - copy.starts[row]) {
        fail(*out, "large enough", "no room for row " + std::to_string(row));
      }
      cells += size;
    }
    const int64_t index = static_cast<int64_t>(copies_.size());
    copies_.push_back(copy);
    if (copy.rows->any_list()) {
      add_units(&list_units_, index, copy.rows->num_rows(), cells * kBytesPerListItem);
    }
    if (copy.rows->any_array()) {
      add_units(&units_, index, copy.rows->num_rows(), cells * element_size(copy.dtype));
    }
  }

  // (out, lengths, value); value None: a mask. Units of fills follow those of all copies.
  void add_fill(const py::tuple& job) {
    FillJob fill_job;
    const Borrowed& out = borrow(job[0], "out");
    const Borrowed& lengths = borrow(job[1], "lengths");
    check_ndim(*out, 2);
    check_cpu_array(*lengths, DType::kInt64, 1);
    fill_job.out = out->data;
    fill_job.dtype = out->dtype;
    fill_job.layout.num_rows = lengths->shape[0];
    fill_job.layout.width = out->shape[1];
    fill_job.layout.lengths = lengths->ptr<int64_t>();
    fill_job.is_mask = job[2].is_none();
    if (!fill_job.is_mask) fill_job.value = py::cast<double>(job[2]);
    if (out->shape[0] < lengths->shape[0]) fail(*out, "one row per length", out->shape_string());
    if (fill_job.is_mask || out->dtype != DType::kFloat32) check_dtype(*out, DType::kInt64);
    int64_t cells = 0;
    for (int64_t row = 0; row < fill_job.layout.num_rows; ++row) {
      const int64_t length = fill_job.layout.lengths[row];
      if (length < 0 || length > fill_job.layout.width) {
        fail(*lengths, "0 to " + std::to_string(fill_job.layout.width),
             std::to_string(length) + " at row " + std::to_string(row));
      }
      cells += fill_job.is_mask ? fill_job.layout.width : fill_job.layout.num_pads(row);
    }
    const int64_t index = static_cast<int64_t>(copies_.size() + fills_.size());
    fills_.push_back(fill_job);
    add_units(&units_, index, fill_job.layout.num_rows, cells * element_size(fill_job.dtype));
  }

  void read_lists() {
    work_on_lists();
    while (num_lists_done_.load(std::memory_order_acquire) <
           static_cast<int64_t>(list_units_.size())) {
      std::this_thread::yield();  // at most for one unit
    }
  }

  void work_on_lists() {
    const int64_t num_units = static_cast<int64_t>(list_units_.size());
    for (int64_t i = next_list_unit_++; i < num_units; i = next_list_unit_++) {
      Unit& unit = list_units_[i];
      const CopyJob& copy = copies_[unit.job];
      unit.is_done = kListsByAllThreads;
      const void* before = nullptr;
      for (int64_t row = unit.begin; row < unit.end && unit.is_done; ++row) {
        void* out = copy.place(row);
        unit.is_done = copy.rows->read_plain(row, copy.dtype, out, copy.bounds, before);
        before = out;
      }
      num_lists_done_.fetch_add(1, std::memory_order_release);
    }
  }

  // In the order of fields and rows, so that the first mistake is the one reported.
  void read_other_lists() {
    for (const Unit& unit : list_units_) {
      const CopyJob& copy = copies_[unit.job];
      for (int64_t row = unit.begin; row < unit.end && !unit.is_done; ++row) {
        copy.rows->read_list(row, copy.dtype, copy.place(row), copy.bounds);
      }
    }
  }

  void work() {
    try {
      for (int64_t i = next_unit_++; i < static_cast<int64_t>(units_.size()); i = next_unit_++) {
        do_unit(units_[i]);
      }
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }

  void do_unit(const Unit& unit) {
    const int64_t num_copies = static_cast<int64_t>(copies_.size());
    if (unit.job >= num_copies) {
      const FillJob& job = fills_[unit.job - num_copies];
      if (job.is_mask) {
        return fill_mask_cpu(static_cast<int64_t*>(job.out), job.layout, unit.begin, unit.end);
      }
      return fill_padding_cpu(job.out, job.dtype, job.value, job.layout, unit.begin, unit.end);
    }
    const CopyJob& copy = copies_[unit.job];
    for (int64_t row = unit.begin; row < unit.end; ++row) {
      const int64_t position = copy.rows->copy_array(row, copy.dtype, copy.place(row), copy.bounds);
      if (position >= 0) note_bad(unit.job, row, position);
    }
  }

  // The first in the order of fields and rows is reported, whichever thread found one first.
  void note_bad(int64_t copy, int64_t row, int64_t position) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (bad_copy_ >= 0 && std::pair(bad_copy_, bad_row_) <= std::pair(copy, row)) return;
    bad_copy_ = copy;
    bad_row_ = row;
    bad_position_ = position;
  }

  std::string op_;
  std::vector<std::unique_ptr<Borrowed>> borrowed_;
  std::vector<CopyJob> copies_;
  std::vector<FillJob> fills_;
  std::vector<Unit> units_, list_units_;
  int64_t total_bytes_ = 0;
  std::atomic<int64_t> next_unit_{0}, next_list_unit_{0}, num_lists_done_{0};
  std::mutex mutex_;
  std::exception_ptr failure_;
  int64_t bad_copy_ = -1, bad_row_ = -1, bad_position_ = -1;
};

void fill_rows(const std::string& op, const py::list& copies, const py::list& fills,
               int num_threads) {
  Fill(op, copies, fills).run(num_threads);
}

BlockLayout checked_layout(const Borrowed& starts, const Borrowed& lengths, int64_t num_rows,
                           int64_t width) {
  for (const Borrowed* sizes : {&starts, &lengths}) {
    check_cpu_array(**sizes, DType::kInt64, 1);
    check_size(**sizes, 0, num_rows);
  }
  const BlockLayout layout{num_rows, width, starts->ptr<int64_t>(), lengths->ptr<int64_t>()};
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t length = layout.lengths[row], start = layout.starts[row];
    if (length < 0 || length > width) {
      fail(*lengths, "0 to " + std::to_string(width),
           std::to_string(length) + " at row " + std::to_string(row));
    }
    if (start < 0 || start > width - length) {
      fail(*starts, "within the row", std::to_string(start) + " at row " + std::to_string(row));
    }
  }
  return layout;
}

int64_t cell_bytes_of(const TensorView& t, int first_cell_dim) {
  int64_t bytes = element_size(t.dtype);
  for (int d = first_cell_dim; d < t.ndim; ++d) bytes *= t.shape[d];
  return bytes;
}

// The rows of a flat array: where each begins, and its place in the padded array.
class SKYRL_HIDDEN FlatRows {
 public:
  FlatRows(py::handle cu_obj, py::handle starts_obj, const char* op, const TensorView& padded,
           const TensorView& flat)
      : cu_(cu_obj, op, "cu_seqlens"), starts_(starts_obj, op, "starts") {
    const int64_t num_rows = padded.shape[0], width = padded.shape[1];
    check_cpu_array(*cu_, DType::kInt64, 1);
    check_size(*cu_, 0, num_rows + 1);
    check_cpu_array(*starts_, DType::kInt64, 1);
    check_size(*starts_, 0, num_rows);
    const int64_t* starts = starts_->ptr<const int64_t>();
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t length = cu()[row + 1] - cu()[row];
      if (length < 0 || length > width || starts[row] < 0 || starts[row] > width - length) {
        fail(*starts_, "rows within " + std::to_string(width) + " columns",
             std::to_string(length) + " from " + std::to_string(starts[row]) + " on at row " +
                 std::to_string(row));
      }
      lengths_.push_back(length);
    }
    if (cu()[0] != 0 || cu()[num_rows] != flat.shape[0]) {
      fail(*cu_, "0 to " + std::to_string(flat.shape[0]), std::to_string(cu()[num_rows]));
    }
    layout_ = {num_rows, width, starts, lengths_.data()};
  }
  const int64_t* cu() const { return cu_->ptr<const int64_t>(); }
  const BlockLayout& layout() const { return layout_; }

 private:
  Borrowed cu_, starts_;
  std::vector<int64_t> lengths_;
  BlockLayout layout_;
};

void check_like(const TensorView& t, const TensorView& like, int64_t t_cells, int64_t like_cells) {
  check_dtype(t, like.dtype);
  if (t_cells != like_cells) fail(t, "with cells like the input's", t.shape_string());
}

// padded (N, W, ...), cu int64 (N + 1,), starts int64 (N,) -> flat (S, ...) and position ids int64
// (S,).
void padded_to_flat(py::handle padded_obj, py::handle cu_obj, py::handle starts_obj,
                    py::handle flat_obj, py::handle positions_obj, int num_threads) {
  constexpr char kOp[] = "padded_to_varlen";
  Borrowed padded(padded_obj, kOp, "padded"), flat(flat_obj, kOp, "out");
  Borrowed positions(positions_obj, kOp, "position_ids");
  for (const Borrowed* array : {&padded, &flat}) {
    check_cpu(**array);
    check_contiguous(**array);
  }
  const int64_t cell_bytes = cell_bytes_of(*padded, 2);
  check_like(*flat, *padded, cell_bytes_of(*flat, 1), cell_bytes);
  const FlatRows rows(cu_obj, starts_obj, kOp, *padded, *flat);
  check_cpu_array(*positions, DType::kInt64, 1);
  check_size(*positions, 0, flat->shape[0]);
  py::gil_scoped_release release;
  padded_to_flat_cpu(padded->data, rows.layout(), rows.cu(), cell_bytes, flat->data,
                     positions->ptr<int64_t>(), num_threads);
}

// flat (S, ...), cu int64 (N + 1,), starts int64 (N,) -> padded (N, W, ...); `pattern`: an
// element's bytes, repeated to 16.
void flat_to_padded(py::handle flat_obj, py::handle cu_obj, py::handle starts_obj,
                    const py::bytes& pattern, py::handle padded_obj, int num_threads) {
  constexpr char kOp[] = "varlen_to_padded";
  Borrowed flat(flat_obj, kOp, "values"), padded(padded_obj, kOp, "out");
  for (const Borrowed* array : {&padded, &flat}) {
    check_cpu(**array);
    check_contiguous(**array);
  }
  const int64_t cell_bytes = cell_bytes_of(*flat, 1);
  check_like(*padded, *flat, cell_bytes_of(*padded, 2), cell_bytes);
  const FlatRows rows(cu_obj, starts_obj, kOp, *padded, *flat);
  const std::string bytes = pattern;
  if (static_cast<int64_t>(bytes.size()) != kPatternBytes) {
    throw std::invalid_argument("varlen_to_padded: pattern must have 16 bytes");
  }
  std::string pad_cell(cell_bytes, 0);
  for (int64_t i = 0; i < cell_bytes; ++i) pad_cell[i] = bytes[i % kPatternBytes];
  py::gil_scoped_release release;
  flat_to_padded_cpu(flat->data, rows.layout(), rows.cu(), cell_bytes, pad_cell.data(),
                     padded->data, num_threads);
}

// out (N, T, ...), starts and lengths (N,): `cell` (...) is written to the cells outside each row.
void fill_around(py::handle out_obj, py::handle starts_obj, py::handle lengths_obj,
                 py::handle cell_obj, int num_threads) {
  constexpr char kOp[] = "convert_prompts_responses_to_batch_tensors";
  Borrowed out(out_obj, kOp, "rollout_expert_indices");
  Borrowed starts(starts_obj, kOp, "starts");
  Borrowed lengths(lengths_obj, kOp, "lengths");
  Borrowed cell(cell_obj, kOp, "dummy route");
  check_cpu(*out);
  check_contiguous(*out);
  check_cpu(*cell);
  check_contiguous(*cell);
  const int64_t num_rows = lengths->shape[0];
  if (out->shape[0] < num_rows) fail(*out, "one row per length", out->shape_string());
  const int64_t cell_bytes = cell_bytes_of(*out, 2);
  check_like(*cell, *out, cell_bytes_of(*cell, 0), cell_bytes);
  const BlockLayout layout = checked_layout(starts, lengths, num_rows, out->shape[1]);
  py::gil_scoped_release release;
  fill_around_cpu(out->data, layout, cell_bytes, cell->data, num_threads);
}

// mask (N, W) -> starts and lengths (N,) of each row's block of ones, if nothing else is in it.
void mask_blocks(const std::string& op, py::handle mask_obj, py::handle starts_obj,
                 py::handle lengths_obj, int num_threads) {
  Borrowed mask(mask_obj, op.c_str(), "attention_mask");
  Borrowed starts(starts_obj, op.c_str(), "starts");
  Borrowed lengths(lengths_obj, op.c_str(), "lengths");
  check_cpu(*mask);
  check_ndim(*mask, 2);
  check_contiguous(*mask);
  for (const Borrowed* sizes : {&starts, &lengths}) {
    check_cpu_array(**sizes, DType::kInt64, 1);
    check_size(**sizes, 0, mask->shape[0]);
  }
  int64_t bad = -1;
  auto find = [&](auto* data) {
    py::gil_scoped_release release;
    bad = mask_blocks_cpu(data, mask->shape[0], mask->shape[1], starts->ptr<int64_t>(),
                          lengths->ptr<int64_t>(), num_threads);
  };
  switch (mask->dtype) {
    case DType::kBool:
    case DType::kUInt8: find(mask->ptr<const uint8_t>()); break;
    case DType::kInt32: find(mask->ptr<const int32_t>()); break;
    case DType::kInt64: find(mask->ptr<const int64_t>()); break;
    case DType::kFloat32: find(mask->ptr<const float>()); break;
    default: fail(*mask, "bool, uint8, int32, int64 or float32", dtype_name(mask->dtype));
  }
  if (bad >= 0) {
    fail(*mask, "0 but for one block of 1 in each row",
         "something else in row " + std::to_string(bad));
  }
}

}  // namespace

void bind_pack(py::module_& m) {
  py::class_<Rows>(m, "Rows")
      .def(py::init<std::string, std::string, py::handle>(), py::arg("op"), py::arg("name"),
           py::arg("rows"))
      .def(py::init<std::string, std::string, py::handle, py::handle>(), py::arg("op"),
           py::arg("name"), py::arg("flat"), py::arg("offsets"))
      .def_property_readonly("num_rows", &Rows::num_rows)
      .def_property_readonly("kind", &Rows::kind)
      .def("lengths", &Rows::lengths, py::arg("out"));
  m.def("fill_rows", &fill_rows, py::arg("op"), py::arg("copies"), py::arg("fills"),
        py::arg("num_threads"));
  m.def("padded_to_flat", &padded_to_flat, py::arg("padded"), py::arg("cu_seqlens"),
        py::arg("starts"), py::arg("flat"), py::arg("positions"), py::arg("num_threads"));
  m.def("flat_to_padded", &flat_to_padded, py::arg("flat"), py::arg("cu_seqlens"),
        py::arg("starts"), py::arg("pattern"), py::arg("padded"), py::arg("num_threads"));
  m.def("fill_around", &fill_around, py::arg("out"), py::arg("starts"), py::arg("lengths"),
        py::arg("cell"), py::arg("num_threads"));
  m.def("mask_blocks", &mask_blocks, py::arg("op"), py::arg("mask"), py::arg("starts"),
        py::arg("lengths"), py::arg("num_threads"));
}

}  // namespace skyrl_fast
