// PassPlan, balanced_parts: checks of the batch and of the output arrays, then the launchers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/borrow.h"
#include "bindings/ops.h"
#include "pack/pack.h"
#include "passes/balanced_parts.h"
#include "passes/pass_arrays.h"
#include "passes/pass_plan.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "plan_passes";

void check_array(const TensorView& array, DType dtype, int64_t size) {
  check_cpu_array(array, dtype, 1);
  check_size(array, 0, size);
}

// Offsets of N rows into an array of `total` elements.
std::vector<int64_t> read_offsets(py::handle object, const char* name, int64_t num_rows,
                                  int64_t total) {
  Borrowed offsets(object, kOp, name);
  check_array(*offsets, DType::kInt64, num_rows + 1);
  const int64_t* values = offsets->ptr<const int64_t>();
  for (int64_t row = 0; row <= num_rows; ++row) {
    if (values[row] < (row > 0 ? values[row - 1] : 0) || values[row] > total) {
      fail(*offsets, "non-decreasing offsets from 0 to " + std::to_string(total) + " at most",
           std::to_string(values[row]) + " at " + std::to_string(row));
    }
  }
  return {values, values + num_rows + 1};
}

std::vector<int64_t> read_ids(py::handle object, const char* name, int64_t num_rows) {
  Borrowed ids(object, kOp, name);
  check_array(*ids, DType::kInt64, num_rows);
  return {ids->ptr<const int64_t>(), ids->ptr<const int64_t>() + num_rows};
}

// Recorded routes: contiguous cells of any dtype.
class SKYRL_HIDDEN RouteCells {
 public:
  explicit RouteCells(py::handle object) : cells_(object, kOp, "routes") {
    check_cpu(*cells_);
    check_contiguous(*cells_);
    if (cells_->ndim < 1) fail(*cells_, "(E, ...) of cells", "shape " + cells_->shape_string());
    bytes_ = element_size(cells_->dtype);
    for (int d = 1; d < cells_->ndim; ++d) bytes_ *= cells_->shape[d];
  }
  const uint8_t* data() const { return cells_->ptr<const uint8_t>(); }
  int64_t count() const { return cells_->shape[0]; }
  int64_t bytes() const { return bytes_; }

 private:
  Borrowed cells_;
  int64_t bytes_ = 0;
};

// The kept tokens of a batch: num_kept (A,) int32, ids (B,) int32, cu_kept (N + 1,) int64.
class SKYRL_HIDDEN KeptArrays {
 public:
  KeptArrays(const py::tuple& arrays, const PassRows& rows, const Pass& pass)
      : num_kept_(arrays[0], kOp, "num_kept"),
        ids_(arrays[1], kOp, "kept_ids"),
        cu_kept_(arrays[2], kOp, "cu_kept") {
    check_array(*num_kept_, DType::kInt32, rows.cu_responses[rows.num_rows]);
    check_cpu_array(*ids_, DType::kInt32, 1);
    check_array(*cu_kept_, DType::kInt64, rows.num_rows + 1);
    const int32_t* counts = num_kept_->ptr<const int32_t>();
    const int64_t* offsets = cu_kept_->ptr<const int64_t>();
    for (const int64_t row : pass.rows) {
      int64_t total = 0;
      for (int64_t i = rows.cu_responses[row]; i < rows.cu_responses[row + 1]; ++i) {
        if (counts[i] < 0) fail(*num_kept_, "at least 0", std::to_string(counts[i]));
        total += counts[i];
      }
      if (offsets[row] < 0 || offsets[row] > ids_->numel() - total) {
        fail(*num_kept_, "those of kept_ids",
             std::to_string(total) + " in row " + std::to_string(row));
      }
    }
  }
  KeptRows view() const {
    return {num_kept_->ptr<const int32_t>(), ids_->ptr<const int32_t>(),
            cu_kept_->ptr<const int64_t>()};
  }

 private:
  Borrowed num_kept_, ids_, cu_kept_;
};

// A plan, and what it was made from except the tokens, routes and kept tokens.
class SKYRL_HIDDEN BoundPassPlan {
 public:
  // tokens (S,) int32; trained (A,) and visited (N,) bool; rows = cu_tokens, cu_responses (N + 1,),
  // group_ids, trajectory_ids (N,), all int64; routes = None, or (E, ...) cells and their offsets
  // (N + 1,) int64; costs = None, or those of `LayoutCosts`.
  BoundPassPlan(py::handle tokens_obj, py::handle trained_obj, const py::tuple& rows,
                py::handle visited_obj, const std::optional<py::tuple>& routes,
                int64_t token_budget, bool keep_trajectories, bool tree,
                const std::optional<std::vector<double>>& costs,
                const std::vector<int64_t>& length_limits, int64_t longest_row, int num_threads) {
    Borrowed tokens(tokens_obj, kOp, "tokens"), visited(visited_obj, kOp, "rows");
    check_cpu_array(*visited, DType::kBool, 1);
    num_rows_ = visited->numel();
    read_batch(*tokens, trained_obj, rows[0], rows[1]);
    const std::vector<int64_t> groups = read_ids(rows[2], "group_ids", num_rows_);
    const std::vector<int64_t> trajectories = read_ids(rows[3], "trajectory_ids", num_rows_);
    if (token_budget < 1) {
      throw std::invalid_argument("plan_micro_batches: token_budget: expected at least 1, got " +
                                  std::to_string(token_budget));
    }
    std::optional<RouteCells> cells;
    if (routes) read_routes(*routes, &cells);
    check_rows();
    PassRows view = view_of(tokens->ptr<const int32_t>(), cells ? cells->data() : nullptr);
    view.group_ids = groups.data();
    view.trajectory_ids = trajectories.data();
    std::optional<LayoutCosts> layout_costs;
    if (costs) {
      layout_costs = {costs->at(0), costs->at(1), costs->at(2), costs->at(3), costs->at(4)};
    }
    const PassOptions options{token_budget,  keep_trajectories,
                              tree,          layout_costs ? &*layout_costs : nullptr,
                              length_limits, longest_row};
    py::gil_scoped_release release;
    plan_ = std::make_unique<PassPlan>(view, visited->ptr<const uint8_t>(), options, num_threads);
  }

  // layouts = for each pass whether it is a tree, and what `write_layout` wrote; the rest as above.
  BoundPassPlan(py::handle tokens_obj, py::handle trained_obj, py::handle cu_tokens,
                py::handle cu_responses, int64_t num_rows, const std::optional<py::tuple>& routes,
                const std::vector<std::pair<bool, py::object>>& layouts, int num_threads)
      : num_rows_(num_rows) {
    Borrowed tokens(tokens_obj, kOp, "tokens");
    read_batch(*tokens, trained_obj, cu_tokens, cu_responses);
    std::optional<RouteCells> cells;
    if (routes) read_routes(*routes, &cells);
    check_rows();
    std::vector<std::unique_ptr<Borrowed>> borrowed;
    std::vector<PassLayout> passes;
    for (const auto& [is_tree, numbers] : layouts) {
      borrowed.push_back(std::make_unique<Borrowed>(numbers, kOp, "layouts"));
      const TensorView& view = **borrowed.back();
      check_cpu_array(view, DType::kInt64, 2);
      check_size(view, 0, 3);
      const int64_t count = view.shape[1];
      const int64_t* values = view.ptr<const int64_t>();
      passes.push_back({is_tree, count, values, values + count, values + 2 * count});
    }
    const PassRows view = view_of(tokens->ptr<const int32_t>(), cells ? cells->data() : nullptr);
    py::gil_scoped_release release;
    plan_ = std::make_unique<PassPlan>(view, passes, num_threads);
  }

  int64_t num_passes() const { return static_cast<int64_t>(plan_->passes().size()); }

  // out (P, 5) int64: whether it is of trees, sequences, width, rows, trained tokens.
  void write_sizes(py::handle out_obj) const {
    Borrowed out(out_obj, kOp, "out");
    check_cpu_array(*out, DType::kInt64, 2);
    check_size(*out, 0, num_passes());
    check_size(*out, 1, 5);
    int64_t* values = out->ptr<int64_t>();
    for (const Pass& pass : plan_->passes()) {
      *values++ = pass.is_tree;
      *values++ = pass.num_sequences();
      *values++ = pass.width;
      *values++ = static_cast<int64_t>(pass.rows.size());
      *values++ = pass.num_trained;
    }
  }

  // out (3, n) int64 for the n rows of a pass: those of a `PassLayout`.
  void write_layout(int64_t number, py::handle out_obj) const {
    Borrowed out(out_obj, kOp, "out");
    check_cpu_array(*out, DType::kInt64, 2);
    const int64_t count = static_cast<int64_t>(plan_->passes().at(number).rows.size());
    check_size(*out, 0, 3);
    check_size(*out, 1, count);
    int64_t* values = out->ptr<int64_t>();
    plan_->write_layout(number, values, values + count, values + 2 * count);
  }

  int64_t num_kept_tokens(int64_t number, const py::tuple& kept) const {
    const Pass& pass = plan_->passes().at(number);
    const PassRows rows = view_of(nullptr, nullptr);
    return skyrl_fast::num_kept_tokens(rows, pass, KeptArrays(kept, rows, pass).view());
  }

  // out: contiguous arrays by name, those of `PassArrays`; "parents", "ends" and "positions" of
  // trees only, "kept_ids" and "cu_kept" with `kept` = those of `KeptArrays`, "expert_indices" and
  // "router_padding_mask" with `routes` = the plan's cells.
  int64_t write(int64_t number, py::handle tokens_obj, const py::object& routes,
                const std::optional<py::tuple>& kept, const py::dict& out) const {
    const Pass& pass = plan_->passes().at(number);
    Borrowed tokens(tokens_obj, kOp, "tokens");
    check_array(*tokens, DType::kInt32, num_tokens_);
    std::optional<RouteCells> cells;
    if (!routes.is_none()) {
      cells.emplace(routes);
      if (cells->bytes() != route_bytes_ || cells->count() < cu_routes_.back()) {
        throw std::invalid_argument(std::string(kOp) + ": routes: expected those of the plan");
      }
    }
    const PassRows rows = view_of(tokens->ptr<const int32_t>(), cells ? cells->data() : nullptr);
    const int64_t size = pass.num_sequences() * pass.width;
    PassArrays arrays{};
    std::vector<std::unique_ptr<Borrowed>> borrowed;
    const auto array = [&](const char* name, DType dtype, int64_t numel) {
      borrowed.push_back(std::make_unique<Borrowed>(out[name], kOp, name));
      const TensorView& view = **borrowed.back();
      check_cpu(view);
      check_dtype(view, dtype);
      check_contiguous(view);
      if (view.numel() != numel) {
        fail(view, std::to_string(numel) + " elements", "shape " + view.shape_string());
      }
      return view.data;
    };
    const auto int64s = [&](const char* name, int64_t numel) {
      return static_cast<int64_t*>(array(name, DType::kInt64, numel));
    };
    arrays.input_ids = int64s("input_ids", size);
    arrays.rows = int64s("rows", static_cast<int64_t>(pass.rows.size()));
    arrays.hidden_index = int64s("hidden_index", pass.num_trained);
    arrays.target_ids = int64s("target_ids", pass.num_trained);
    arrays.response_index = int64s("response_index", pass.num_trained);
    arrays.copies = int64s("copies", pass.num_trained);
    if (pass.is_tree) {
      arrays.parents = static_cast<int32_t*>(array("parents", DType::kInt32, size));
      arrays.ends = static_cast<int32_t*>(array("ends", DType::kInt32, size));
      arrays.positions = int64s("positions", size);
    }
    std::optional<KeptArrays> kept_arrays;
    KeptRows kept_rows;
    if (kept) {
      kept_rows = kept_arrays.emplace(*kept, rows, pass).view();
      const int64_t total = skyrl_fast::num_kept_tokens(rows, pass, kept_rows);
      arrays.kept_ids = static_cast<int32_t*>(array("kept_ids", DType::kInt32, total));
      arrays.cu_kept = int64s("cu_kept", pass.num_trained + 1);
    }
    if (cells) {
      arrays.has_no_route = static_cast<uint8_t*>(array("router_padding_mask", DType::kBool, size));
      borrowed.push_back(std::make_unique<Borrowed>(out["expert_indices"], kOp, "expert_indices"));
      const TensorView& view = **borrowed.back();
      check_cpu(view);
      check_contiguous(view);
      if (view.numel() * element_size(view.dtype) != size * route_bytes_) {
        fail(view, "the routes of " + std::to_string(size) + " tokens",
             "shape " + view.shape_string());
      }
      arrays.routes = view.ptr<uint8_t>();
    }
    py::gil_scoped_release release;
    return write_pass_cpu(rows, *plan_, pass, kept_rows, arrays);
  }

 private:
  // Of `num_rows_` rows.
  void read_batch(const TensorView& tokens, py::handle trained_obj, py::handle cu_tokens,
                  py::handle cu_responses) {
    Borrowed trained(trained_obj, kOp, "trained");
    check_cpu_array(tokens, DType::kInt32, 1);
    check_cpu_array(*trained, DType::kBool, 1);
    num_tokens_ = tokens.numel();
    cu_tokens_ = read_offsets(cu_tokens, "cu_seqlens", num_rows_, num_tokens_);
    cu_responses_ = read_offsets(cu_responses, "cu_responses", num_rows_, trained->numel());
    const uint8_t* mask = trained->ptr<const uint8_t>();
    trained_.assign(mask, mask + trained->numel());
  }

  void read_routes(const py::tuple& routes, std::optional<RouteCells>* cells) {
    cells->emplace(routes[0]);
    cu_routes_ = read_offsets(routes[1], "cu_routes", num_rows_, (*cells)->count());
    route_bytes_ = (*cells)->bytes();
  }

  void check_rows() const {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t length = cu_tokens_[row + 1] - cu_tokens_[row];
      if (cu_responses_[row + 1] - cu_responses_[row] > length ||
          (!cu_routes_.empty() && cu_routes_[row + 1] - cu_routes_[row] > length) ||
          length > std::numeric_limits<int32_t>::max()) {
        throw std::invalid_argument(std::string(kOp) + ": row " + std::to_string(row) + " of " +
                                    std::to_string(length) +
                                    " tokens must not have more response tokens or routes");
      }
    }
  }

  PassRows view_of(const int32_t* tokens, const uint8_t* routes) const {
    PassRows rows;
    rows.num_rows = num_rows_;
    rows.tokens = tokens;
    rows.cu_tokens = cu_tokens_.data();
    rows.cu_responses = cu_responses_.data();
    rows.trained = trained_.data();
    rows.routes = routes;
    rows.cu_routes = cu_routes_.data();
    rows.route_bytes = route_bytes_;
    return rows;
  }

  int64_t num_rows_ = 0, num_tokens_ = 0, route_bytes_ = 0;
  std::vector<int64_t> cu_tokens_, cu_responses_, cu_routes_;
  std::vector<uint8_t> trained_;
  std::unique_ptr<PassPlan> plan_;
};

int64_t balanced_parts(py::handle loads_obj, int64_t budget, int64_t multiple,
                       py::handle parts_obj) {
  constexpr char kSplit[] = "split_micro_batches";
  Borrowed loads(loads_obj, kSplit, "lengths"), parts(parts_obj, kSplit, "out");
  check_cpu_array(*loads, DType::kInt64, 1);
  check_array(*parts, DType::kInt64, loads->numel());
  py::gil_scoped_release release;
  return balanced_parts_cpu(loads->ptr<const int64_t>(), loads->numel(), budget, multiple,
                            parts->ptr<int64_t>());
}

}  // namespace

void bind_passes(py::module_& m) {
  py::class_<BoundPassPlan>(m, "PassPlan")
      .def(py::init<py::handle, py::handle, const py::tuple&, py::handle,
                    const std::optional<py::tuple>&, int64_t, bool, bool,
                    const std::optional<std::vector<double>>&, const std::vector<int64_t>&, int64_t,
                    int>(),
           py::arg("tokens"), py::arg("trained"), py::arg("rows"), py::arg("visited"),
           py::arg("routes"), py::arg("token_budget"), py::arg("keep_trajectories"),
           py::arg("tree"), py::arg("costs"), py::arg("length_limits"), py::arg("longest_row"),
           py::arg("num_threads"))
      .def(py::init<py::handle, py::handle, py::handle, py::handle, int64_t,
                    const std::optional<py::tuple>&,
                    const std::vector<std::pair<bool, py::object>>&, int>(),
           py::arg("tokens"), py::arg("trained"), py::arg("cu_tokens"), py::arg("cu_responses"),
           py::arg("num_rows"), py::arg("routes"), py::arg("layouts"), py::arg("num_threads"))
      .def_property_readonly("num_passes", &BoundPassPlan::num_passes)
      .def("write_sizes", &BoundPassPlan::write_sizes, py::arg("out"))
      .def("write_layout", &BoundPassPlan::write_layout, py::arg("number"), py::arg("out"))
      .def("num_kept_tokens", &BoundPassPlan::num_kept_tokens, py::arg("number"), py::arg("kept"))
      .def("write", &BoundPassPlan::write, py::arg("number"), py::arg("tokens"), py::arg("routes"),
           py::arg("kept"), py::arg("out"));
  m.def("balanced_parts", &balanced_parts, py::arg("loads"), py::arg("budget"), py::arg("multiple"),
        py::arg("out"));
}

}  // namespace skyrl_fast
