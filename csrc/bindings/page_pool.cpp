// Blocks of the page pool as Python objects with the buffer protocol.
#include "core/page_pool.h"

#include <pybind11/pybind11.h>

#include <new>
#include <stdexcept>

#include "bindings/ops.h"

namespace skyrl_fast {
namespace {

namespace py = pybind11;

// A block that returns to the pool when the last tensor on it is freed.
class PageBlock {
 public:
  explicit PageBlock(int64_t num_bytes) : num_bytes_(num_bytes) {
    if (num_bytes <= 0) throw std::invalid_argument("PageBlock: num_bytes: expected at least 1");
    pages_ = page_pool().take(num_bytes);
  }
  ~PageBlock() { page_pool().give(pages_); }
  PageBlock(const PageBlock&) = delete;
  PageBlock& operator=(const PageBlock&) = delete;

  py::buffer_info buffer() const {
    return py::buffer_info(static_cast<uint8_t*>(pages_.data), num_bytes_);
  }

 private:
  Pages pages_;
  int64_t num_bytes_;
};

}  // namespace

void bind_page_pool(py::module_& m) {
  py::class_<PageBlock>(m, "PageBlock", py::buffer_protocol())
      .def(py::init<int64_t>(), py::arg("num_bytes"))
      .def_buffer([](PageBlock& block) { return block.buffer(); });
  m.def(
      "set_page_pool_limit", [](int64_t num_bytes) { page_pool().set_idle_limit(num_bytes); },
      py::arg("num_bytes"));
  m.def("page_pool_limit", [] { return page_pool().idle_limit(); });
  m.def("page_pool_idle_bytes", [] { return page_pool().idle_bytes(); });
}

}  // namespace skyrl_fast
