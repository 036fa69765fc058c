// tree_attention: checks of the tree and of the heads, then the kernels.
#include <pybind11/pybind11.h>

#include <optional>

#include "bindings/borrow.h"
#include "bindings/ops.h"
#include "prefix_tree/tree_attention.h"

namespace skyrl_fast {
namespace {

constexpr char kTreeAttention[] = "tree_attention";

// A borrowed (1, heads, T, D) float32 tensor whose last dimension is consecutive.
class SKYRL_HIDDEN BorrowedHeads {
 public:
  BorrowedHeads(py::handle object, const char* name) : array_(object, kTreeAttention, name) {
    check_cpu(*array_);
    check_dtype(*array_, DType::kFloat32);
    check_ndim(*array_, 4);
    check_size(*array_, 0, 1);
    if (array_->shape[3] > 1 && array_->stride[3] != 1) {
      fail(*array_, "consecutive in its last dimension", "a stride");
    }
  }
  const TensorView& operator*() const { return *array_; }
  const TensorView* operator->() const { return &*array_; }

  void check_shape(int64_t heads, int64_t nodes, int64_t size) const {
    check_size(*array_, 1, heads);
    check_size(*array_, 2, nodes);
    check_size(*array_, 3, size);
  }
  template <typename Float>
  Heads<Float> heads() const {
    return {array_->ptr<Float>(), array_->stride[1], array_->stride[2]};
  }

 private:
  Borrowed array_;
};

AttentionShape checked_attention_shape(const TreeTiles& tiles, const BorrowedHeads& query,
                                       const BorrowedHeads& key, const BorrowedHeads& value,
                                       double scale, double softcap) {
  const int64_t heads = query->shape[1], kv_heads = key->shape[1], size = query->shape[3];
  query.check_shape(heads, tiles.num_nodes(), size);
  if (kv_heads == 0 || heads % kv_heads != 0) {
    fail(*key, "a number of heads that divides " + std::to_string(heads),
         "shape " + key->shape_string());
  }
  key.check_shape(kv_heads, tiles.num_nodes(), size);
  value.check_shape(kv_heads, tiles.num_nodes(), size);
  return {heads, kv_heads, size, static_cast<float>(scale), static_cast<float>(softcap)};
}

void check_attention_lse(const Borrowed& lse, const AttentionShape& shape, const TreeTiles& tiles) {
  check_cpu_array(*lse, DType::kFloat32, 2);
  check_size(*lse, 0, shape.num_heads);
  check_size(*lse, 1, tiles.num_nodes());
}

void attention_forward(const TreeTiles& tiles, py::handle query, py::handle key, py::handle value,
                       double scale, double softcap, py::handle sinks, py::handle out,
                       py::handle lse, int num_threads) {
  const BorrowedHeads q(query, "query"), k(key, "key"), v(value, "value"), o(out, "out");
  const Borrowed l(lse, kTreeAttention, "lse");
  const AttentionShape shape = checked_attention_shape(tiles, q, k, v, scale, softcap);
  std::optional<Borrowed> s;
  if (!sinks.is_none()) {
    s.emplace(sinks, kTreeAttention, "sinks");
    check_cpu_array(**s, DType::kFloat32, 1);
    check_size(**s, 0, shape.num_heads);
  }
  o.check_shape(shape.num_heads, tiles.num_nodes(), shape.head_size);
  check_attention_lse(l, shape, tiles);
  py::gil_scoped_release release;
  tree_attention(tiles, shape, q.heads<const float>(), k.heads<const float>(),
                 v.heads<const float>(), s ? (*s)->ptr<const float>() : nullptr, o.heads<float>(),
                 l->ptr<float>(), num_threads);
}

void attention_backward(const TreeTiles& tiles, const py::tuple& saved, py::handle grad,
                        double scale, double softcap, const py::tuple& grads, int num_threads) {
  const BorrowedHeads q(saved[0], "query"), k(saved[1], "key"), v(saved[2], "value");
  const BorrowedHeads o(saved[3], "out"), g(grad, "grad");
  const Borrowed l(saved[4], kTreeAttention, "lse");
  const BorrowedHeads dq(grads[0], "query_grad"), dk(grads[1], "key_grad"),
      dv(grads[2], "value_grad");
  const AttentionShape shape = checked_attention_shape(tiles, q, k, v, scale, softcap);
  for (const BorrowedHeads* heads : {&o, &g, &dq}) {
    heads->check_shape(shape.num_heads, tiles.num_nodes(), shape.head_size);
  }
  for (const BorrowedHeads* heads : {&dk, &dv}) {
    heads->check_shape(shape.num_kv_heads, tiles.num_nodes(), shape.head_size);
  }
  check_attention_lse(l, shape, tiles);
  py::gil_scoped_release release;
  tree_attention_backward(tiles, shape, q.heads<const float>(), k.heads<const float>(),
                          v.heads<const float>(), o.heads<const float>(), l->ptr<const float>(),
                          g.heads<const float>(),
                          {dq.heads<float>(), dk.heads<float>(), dv.heads<float>()}, num_threads);
}

TreeTiles make_tiles(py::handle parents, py::handle ends, int64_t window, int64_t chunk) {
  const Borrowed p(parents, kTreeAttention, "parents"), e(ends, kTreeAttention, "ends");
  check_cpu_array(*p, DType::kInt32, 1);
  check_cpu_array(*e, DType::kInt32, 1);
  check_size(*e, 0, p->numel());
  py::gil_scoped_release release;
  return TreeTiles(p->ptr<const int32_t>(), e->ptr<const int32_t>(), p->numel(), {window, chunk});
}

}  // namespace

void bind_tree_attention(py::module_& m) {
  py::class_<TreeTiles>(m, "TreeTiles")
      .def(py::init(&make_tiles), py::arg("parents"), py::arg("ends"), py::arg("window") = 0,
           py::arg("chunk") = 0)
      .def_property_readonly("num_nodes", &TreeTiles::num_nodes)
      .def_property_readonly("num_tiles", &TreeTiles::num_tiles)
      .def("forward", &attention_forward, py::arg("query"), py::arg("key"), py::arg("value"),
           py::arg("scale"), py::arg("softcap"), py::arg("sinks").none(true), py::arg("out"),
           py::arg("lse"), py::arg("num_threads"))
      .def("backward", &attention_backward, py::arg("saved"), py::arg("grad"), py::arg("scale"),
           py::arg("softcap"), py::arg("grads"), py::arg("num_threads"));
}

}  // namespace skyrl_fast
