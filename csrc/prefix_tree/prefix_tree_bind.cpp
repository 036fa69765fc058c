// build_prefix_tree: checks of the rows and of the output arrays, then the tree.
#include <pybind11/pybind11.h>

#include <limits>
#include <memory>
#include <string>

#include "bindings/borrow.h"
#include "bindings/ops.h"
#include "pack/pack.h"
#include "prefix_tree/prefix_tree.h"

namespace skyrl_fast {
namespace {

constexpr char kOp[] = "build_prefix_tree";

// A tree and the arrays that it was built from.
class SKYRL_HIDDEN BuiltTree {
 public:
  // tokens (S,) int32; rows = starts, lengths, group_ids, all (N,) int64; labels = None, or cells
  // (E, ...) with label_starts and label_counts, (N,) int64.
  BuiltTree(py::handle tokens, const py::tuple& rows, const py::object& labels, int num_threads)
      : owners_(py::make_tuple(tokens, rows, labels)),
        tokens_(tokens, kOp, "tokens"),
        starts_(rows[0], kOp, "cu_seqlens"),
        lengths_(rows[1], kOp, "lengths"),
        group_ids_(rows[2], kOp, "group_ids") {
    check_cpu_array(*tokens_, DType::kInt32, 1);
    rows_.num_rows = starts_->numel();
    for (const Borrowed* array : {&starts_, &lengths_, &group_ids_}) check_rows(*array);
    rows_.tokens = tokens_->ptr<const int32_t>();
    rows_.starts = starts_->ptr<const int64_t>();
    rows_.lengths = lengths_->ptr<const int64_t>();
    check_inside(*lengths_, rows_.starts, rows_.lengths, tokens_->numel());
    if (!labels.is_none()) add_labels(labels.cast<py::tuple>());
    py::gil_scoped_release release;
    tree_ = std::make_unique<PrefixTree>(rows_, group_ids_->ptr<const int64_t>(), num_threads);
  }

  int64_t num_nodes() const { return tree_->num_nodes(); }
  int64_t num_groups() const { return tree_->num_groups(); }

  // nodes = tokens, parents, positions, ends, sources; row_nodes has the node of row r's tokens
  // from row_node_starts[r] on.
  void write(const py::tuple& nodes, py::handle group_starts, py::handle row_nodes,
             py::handle row_node_starts, int num_threads) const {
    if (num_nodes() > std::numeric_limits<int32_t>::max()) {
      throw std::invalid_argument(std::string(kOp) + ": tokens must make less than 2^31 nodes");
    }
    Borrowed tokens(nodes[0], kOp, "out"), parents(nodes[1], kOp, "out"),
        positions(nodes[2], kOp, "out"), ends(nodes[3], kOp, "out"), sources(nodes[4], kOp, "out");
    Borrowed groups(group_starts, kOp, "out"), node_of_token(row_nodes, kOp, "out"),
        node_starts(row_node_starts, kOp, "out");
    for (const Borrowed* array : {&tokens, &parents, &positions, &ends}) {
      check_out(**array, DType::kInt32, num_nodes());
    }
    check_out(*sources, DType::kInt64, num_nodes());
    check_out(*groups, DType::kInt32, num_groups() + 1);
    check_cpu_array(*node_of_token, DType::kInt32, 1);
    check_out(*node_starts, DType::kInt64, rows_.num_rows);
    check_inside(*node_of_token, node_starts->ptr<const int64_t>(), rows_.lengths,
                 node_of_token->numel());
    const TreeArrays out{tokens->ptr<int32_t>(),        parents->ptr<int32_t>(),
                         positions->ptr<int32_t>(),     ends->ptr<int32_t>(),
                         sources->ptr<int64_t>(),       groups->ptr<int32_t>(),
                         node_of_token->ptr<int32_t>(), node_starts->ptr<const int64_t>()};
    py::gil_scoped_release release;
    tree_->write(rows_, out, num_threads);
  }

 private:
  void check_rows(const Borrowed& array) const {
    check_cpu_array(*array, DType::kInt64, 1);
    check_size(*array, 0, rows_.num_rows);
  }

  static void check_out(const TensorView& array, DType dtype, int64_t size) {
    check_cpu_array(array, dtype, 1);
    check_size(array, 0, size);
  }

  void check_inside(const TensorView& array, const int64_t* starts, const int64_t* lengths,
                    int64_t total) const {
    for (int64_t row = 0; row < rows_.num_rows; ++row) {
      if (lengths[row] < 0 || (lengths[row] > 0 && (starts[row] < 0 || lengths[row] > total ||
                                                    starts[row] > total - lengths[row]))) {
        fail(array, "within the array that it indexes",
             "row " + std::to_string(row) + " beyond it");
      }
    }
  }

  void add_labels(const py::tuple& labels) {
    labels_ = std::make_unique<Borrowed>(labels[0], kOp, "labels");
    label_starts_ = std::make_unique<Borrowed>(labels[1], kOp, "cu_labels");
    label_counts_ = std::make_unique<Borrowed>(labels[2], kOp, "cu_labels");
    const TensorView& cells = **labels_;
    check_cpu(cells);
    check_contiguous(cells);
    for (const auto* array : {&label_starts_, &label_counts_}) check_rows(**array);
    rows_.label_starts = (*label_starts_)->ptr<const int64_t>();
    rows_.label_counts = (*label_counts_)->ptr<const int64_t>();
    check_inside(**label_counts_, rows_.label_starts, rows_.label_counts, cells.shape[0]);
    rows_.label_bytes = element_size(cells.dtype);
    for (int d = 1; d < cells.ndim; ++d) rows_.label_bytes *= cells.shape[d];
    if (rows_.label_bytes > 0) rows_.labels = cells.ptr<const uint8_t>();
  }

  py::tuple owners_;  // kept alive for the borrowed views
  Borrowed tokens_, starts_, lengths_, group_ids_;
  std::unique_ptr<Borrowed> labels_, label_starts_, label_counts_;
  TreeRows rows_;
  std::unique_ptr<PrefixTree> tree_;
};

}  // namespace

void bind_prefix_tree(py::module_& m) {
  py::class_<BuiltTree>(m, "PrefixTree")
      .def(py::init<py::handle, const py::tuple&, const py::object&, int>(), py::arg("tokens"),
           py::arg("rows"), py::arg("labels"), py::arg("num_threads"))
      .def_property_readonly("num_nodes", &BuiltTree::num_nodes)
      .def_property_readonly("num_groups", &BuiltTree::num_groups)
      .def("write", &BuiltTree::write, py::arg("nodes"), py::arg("group_starts"),
           py::arg("row_nodes"), py::arg("row_node_starts"), py::arg("num_threads"));
}

}  // namespace skyrl_fast
