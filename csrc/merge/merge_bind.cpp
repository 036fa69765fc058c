// Merging steps: checks, and token ids compared in the buffers and lists that hold them.
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/borrow.h"
#include "bindings/ops.h"
#include "bindings/rows.h"
#include "core/parallel.h"
#include "merge/merge.h"

namespace skyrl_fast {
namespace {

// (N,) lengths and ids of the rows, the mask, and the outputs of a plan.
class Plan {
 public:
  Plan(const std::string& op, const py::tuple& rows, int64_t max_drift, const py::tuple& out)
      : op_(op),
        prompts_(rows[0], op_.c_str(), "prompt_lengths"),
        responses_(rows[1], op_.c_str(), "response_lengths"),
        ids_(rows[2], op_.c_str(), "trajectory_ids"),
        overlaps_(out[0], op_.c_str(), "overlaps"),
        joins_(out[1], op_.c_str(), "joins"),
        limits_(out[2], op_.c_str(), "limits"),
        max_drift_(max_drift) {
    rows_.num_rows = prompts_->numel();
    for (const Borrowed* array : {&prompts_, &responses_, &overlaps_, &limits_}) {
      check_rows(*array, DType::kInt64);
    }
    check_rows(ids_, DType::kInt32);
    check_rows(joins_, DType::kUInt8);
    rows_.prompt_lengths = prompts_->ptr<int64_t>();
    rows_.response_lengths = responses_->ptr<int64_t>();
    rows_.trajectory_ids = ids_->ptr<int32_t>();
    if (!rows[3].is_none()) add_mask(rows[3]);
  }

  const MergeRows& rows() const { return rows_; }
  int64_t max_drift() const { return max_drift_; }
  int64_t* overlaps() const { return overlaps_->ptr<int64_t>(); }

  void decide() const {
    merge_plan_cpu(rows_, overlaps(), max_drift_, joins_->ptr<uint8_t>(), limits_->ptr<int64_t>());
  }

 private:
  void check_rows(const Borrowed& array, DType dtype) const {
    check_cpu_array(*array, dtype, 1);
    check_size(*array, 0, rows_.num_rows);
  }

  void add_mask(py::handle object) {
    mask_ = std::make_unique<Borrowed>(object, op_.c_str(), "loss_mask");
    const Borrowed& mask = *mask_;
    check_cpu_array(*mask, DType::kUInt8, 1);
    int64_t total = 0;
    for (int64_t row = 0; row < rows_.num_rows; ++row) total += rows_.response_lengths[row];
    check_size(*mask, 0, total);
    rows_.loss_mask = mask->ptr<uint8_t>();
  }

  std::string op_;
  Borrowed prompts_, responses_, ids_, overlaps_, joins_, limits_;
  std::unique_ptr<Borrowed> mask_;
  int64_t max_drift_;
  MergeRows rows_;
};

template <typename Offset>
void check_offsets(const TensorView& cu, const MergeRows& rows, int64_t num_tokens) {
  const Offset* offsets = cu.ptr<Offset>();
  bool good = offsets[0] == 0 && offsets[rows.num_rows] <= num_tokens;
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    good &= rows.prompt_lengths[row] >= 0 && rows.response_lengths[row] >= 0 &&
            offsets[row + 1] - offsets[row] == rows.length(row);
  }
  if (!good) fail(cu, "offsets that match the row lengths", "other offsets");
}

// Rows whose tokens, prompt then response, are stored end to end.
void merge_plan_flat(const std::string& op, py::handle tokens_obj, py::handle cu_seqlens_obj,
                     const py::tuple& rows, int64_t max_drift, const py::tuple& out,
                     int num_threads) {
  Plan plan(op, rows, max_drift, out);
  Borrowed tokens(tokens_obj, op.c_str(), "tokens");
  Borrowed cu(cu_seqlens_obj, op.c_str(), "cu_seqlens");
  check_cpu_array(*tokens, DType::kInt32, 1);
  const auto compare = [&](auto offset) {
    using Offset = decltype(offset);
    check_cpu_array(*cu, sizeof(Offset) == 4 ? DType::kInt32 : DType::kInt64, 1);
    check_size(*cu, 0, plan.rows().num_rows + 1);
    check_offsets<Offset>(*cu, plan.rows(), tokens->numel());
    py::gil_scoped_release release;
    overlaps_cpu(tokens->ptr<const int32_t>(), cu->ptr<const Offset>(), plan.rows(), max_drift,
                 plan.overlaps(), num_threads);
    plan.decide();
  };
  cu->dtype == DType::kInt64 ? compare(int64_t{0}) : compare(int32_t{0});
}

// Compares parts of rows that are lists, arrays, or one of each.
class RowComparison {
 public:
  RowComparison(const Rows& prompts, const Rows& responses)
      : prompts_(prompts), responses_(responses) {}

  // How many tokens of the row's prompt equal the previous row's, `most` at most.
  int64_t overlap(int64_t row, int64_t most) const {
    const int64_t begin = prompts_.size(row - 1);
    const int64_t equal = common(prompts_, row - 1, row, 0, std::min(begin, most));
    if (equal < begin || begin >= most) return equal;
    return begin + common(responses_, row - 1, row, begin, most - begin);
  }

 private:
  // Of rows.row `row` from its beginning and prompt `other` from `begin` on.
  int64_t common(const Rows& rows, int64_t row, int64_t other, int64_t begin, int64_t n) const {
    if (n == 0) return 0;
    PyObject *a = rows.list(row), *b = prompts_.list(other);
    if (a != nullptr && b != nullptr) {
      return common_prefix_of_lists({a, 0, rows.place(row)}, {b, begin, prompts_.place(other)}, n);
    }
    if (a == nullptr && b == nullptr) {
      const ArrayRow &left = rows.array(row), &right = prompts_.array(other);
      if (left.dtype == right.dtype && left.stride == 1 && right.stride == 1) {
        if (left.dtype == DType::kInt32) return common_of<int32_t>(left, right, begin, n);
        if (left.dtype == DType::kInt64) return common_of<int64_t>(left, right, begin, n);
      }
    }
    const std::vector<int64_t> left = ids(rows, row), right = ids(prompts_, other);
    return common_prefix(left.data(), right.data() + begin, n);
  }

  template <typename T>
  static int64_t common_of(const ArrayRow& a, const ArrayRow& b, int64_t begin, int64_t n) {
    return common_prefix(static_cast<const T*>(a.data), static_cast<const T*>(b.data) + begin, n);
  }

  static std::vector<int64_t> ids(const Rows& rows, int64_t row) {
    std::vector<int64_t> out(rows.size(row));
    rows.read_list(row, DType::kInt64, out.data(), Bounds{});
    rows.copy_array(row, DType::kInt64, out.data(), Bounds{});
    return out;
  }

  const Rows& prompts_;
  const Rows& responses_;
};

// Rows as a generator returns them. Array rows are compared by several threads.
void merge_plan_rows(const std::string& op, const Rows& prompts, const Rows& responses,
                     const py::tuple& rows, int64_t max_drift, const py::tuple& out,
                     int num_threads) {
  Plan plan(op, rows, max_drift, out);
  const MergeRows& shape = plan.rows();
  for (const Rows* field : {&prompts, &responses}) field->check_convertible(DType::kInt64);
  int64_t num_tokens = 0;
  for (int64_t row = 0; row < shape.num_rows; ++row) {
    if (prompts.num_rows() != shape.num_rows || responses.num_rows() != shape.num_rows ||
        prompts.size(row) != shape.prompt_lengths[row] ||
        responses.size(row) != shape.response_lengths[row]) {
      throw std::invalid_argument(op + ": the rows must have the given lengths, row " +
                                  std::to_string(row) + " is not");
    }
    num_tokens += shape.length(row);
  }
  const RowComparison comparison(prompts, responses);
  const auto compare = [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const bool continues = shape.continues(row);
      const int64_t most =
          continues ? std::min(shape.length(row - 1), shape.prompt_lengths[row]) : 0;
      plan.overlaps()[row] = most == 0 ? 0 : comparison.overlap(row, most);
    }
  };
  if (prompts.any_list() || responses.any_list()) {
    compare(0, shape.num_rows);
  } else {
    py::gil_scoped_release release;
    constexpr int64_t kTokensPerThread = 1 << 20;
    const int64_t mean = num_tokens / std::max<int64_t>(1, shape.num_rows) + 1;
    parallel_for(num_threads, shape.num_rows, kTokensPerThread / mean + 1, compare);
  }
  plan.decide();
}

// Returns the first row with fewer routes than were recorded before it, or -1.
int64_t merge_routes(const std::string& op, py::handle counts_obj, const py::tuple& plan,
                     const py::tuple& out) {
  Borrowed counts(counts_obj, op.c_str(), "counts");
  Borrowed overlaps(plan[0], op.c_str(), "overlaps");
  Borrowed joins(plan[1], op.c_str(), "joins");
  Borrowed limits(plan[2], op.c_str(), "limits");
  Borrowed begins(out[0], op.c_str(), "begins");
  Borrowed ends(out[1], op.c_str(), "ends");
  for (const Borrowed* array : {&counts, &overlaps, &limits, &begins, &ends}) {
    check_cpu_array(**array, DType::kInt64, 1);
    check_size(**array, 0, counts->numel());
  }
  check_cpu_array(*joins, DType::kUInt8, 1);
  check_size(*joins, 0, counts->numel());
  return merge_routes_cpu(counts->ptr<int64_t>(), counts->numel(), joins->ptr<uint8_t>(),
                          overlaps->ptr<int64_t>(), limits->ptr<int64_t>(), begins->ptr<int64_t>(),
                          ends->ptr<int64_t>());
}

// Cells (S, ...) to cells of the same kind: source[starts[i]:][:lengths[i]] to target.
void copy_segments(const std::string& op, py::handle source_obj, py::handle source_starts_obj,
                   py::handle target_obj, py::handle target_starts_obj, py::handle lengths_obj,
                   int num_threads) {
  Borrowed source(source_obj, op.c_str(), "source");
  Borrowed target(target_obj, op.c_str(), "target");
  Borrowed source_starts(source_starts_obj, op.c_str(), "source_starts");
  Borrowed target_starts(target_starts_obj, op.c_str(), "target_starts");
  Borrowed lengths(lengths_obj, op.c_str(), "lengths");
  int64_t cell_bytes = element_size(source->dtype);
  for (int d = 1; d < source->ndim; ++d) cell_bytes *= source->shape[d];
  for (const Borrowed* array : {&source, &target}) {
    check_cpu(**array);
    check_contiguous(**array);
    check_ndim(**array, source->ndim);
    check_dtype(**array, source->dtype);
    for (int d = 1; d < source->ndim; ++d) check_size(**array, d, source->shape[d]);
  }
  const int64_t n = lengths->numel();
  for (const Borrowed* array : {&source_starts, &target_starts, &lengths}) {
    check_cpu_array(**array, DType::kInt64, 1);
    check_size(**array, 0, n);
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t length = lengths->ptr<int64_t>()[i];
    const int64_t from = source_starts->ptr<int64_t>()[i], to = target_starts->ptr<int64_t>()[i];
    if (length == 0) continue;
    if (length < 0 || from < 0 || to < 0 || length > source->shape[0] - from ||
        length > target->shape[0] - to) {
      fail(*lengths, "within source and target", "segment " + std::to_string(i));
    }
  }
  py::gil_scoped_release release;
  copy_segments_cpu(source->data, source_starts->ptr<int64_t>(), target->data,
                    target_starts->ptr<int64_t>(), lengths->ptr<int64_t>(), n, cell_bytes,
                    num_threads);
}

// Lists of pieces of lists: counts[i] items of rows[i], from begins[i] on, become those of list
// targets[i] from starts[i] on. Targets do not decrease, nor do starts within a target; items
// of the `lengths` that no piece covers are `filler`.
py::list join_lists(const std::string& op, const std::string& field, const py::list& rows,
                    const py::tuple& pieces, py::handle lengths_obj, py::handle filler) {
  const char* names[] = {"begins", "counts", "starts", "targets"};
  std::vector<std::unique_ptr<Borrowed>> borrowed;
  const int64_t num_rows = static_cast<int64_t>(rows.size());
  for (int i = 0; i < 4; ++i) {
    borrowed.push_back(std::make_unique<Borrowed>(pieces[i], op.c_str(), names[i]));
    check_cpu_array(**borrowed.back(), DType::kInt64, 1);
    check_size(**borrowed.back(), 0, num_rows);
  }
  const auto value = [&](int i, int64_t row) { return (*borrowed[i])->ptr<int64_t>()[row]; };
  Borrowed lengths(lengths_obj, op.c_str(), "lengths");
  check_cpu_array(*lengths, DType::kInt64, 1);
  py::list joined;
  std::vector<ListPiece> parts;
  int64_t row = 0;
  for (int64_t target = 0; target < lengths->numel(); ++target) {
    parts.clear();
    const int64_t length = lengths->ptr<int64_t>()[target];
    int64_t filled = 0;
    for (; row < num_rows && value(3, row) == target; ++row) {
      const int64_t begin = value(0, row), count = value(1, row), start = value(2, row);
      if (count == 0) continue;
      PyObject* list = PyList_GET_ITEM(rows.ptr(), row);
      if (begin < 0 || count < 0 || start < filled || count > length - start ||
          list_size(list) < begin + count) {
        fail(*lengths, "lists that hold their pieces", "no room for row " + std::to_string(row));
      }
      filled = start + count;
      parts.push_back({{list, begin, {op.c_str(), field.c_str(), row}}, count, start});
    }
    joined.append(join_list_pieces(parts, length, filler.ptr()));
  }
  return joined;
}

}  // namespace

void bind_merge(py::module_& m) {
  m.def("merge_plan_flat", &merge_plan_flat, py::arg("op"), py::arg("tokens"),
        py::arg("cu_seqlens"), py::arg("rows"), py::arg("max_drift_tokens"), py::arg("out"),
        py::arg("num_threads"));
  m.def("merge_plan_rows", &merge_plan_rows, py::arg("op"), py::arg("prompts"),
        py::arg("responses"), py::arg("rows"), py::arg("max_drift_tokens"), py::arg("out"),
        py::arg("num_threads"));
  m.def("merge_routes", &merge_routes, py::arg("op"), py::arg("counts"), py::arg("plan"),
        py::arg("out"));
  m.def("copy_segments", &copy_segments, py::arg("op"), py::arg("source"), py::arg("source_starts"),
        py::arg("target"), py::arg("target_starts"), py::arg("lengths"), py::arg("num_threads"));
  m.def("join_lists", &join_lists, py::arg("op"), py::arg("field"), py::arg("rows"),
        py::arg("pieces"), py::arg("lengths"), py::arg("filler"));
}

}  // namespace skyrl_fast
