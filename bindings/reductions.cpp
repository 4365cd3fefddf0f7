// Reductions of libddp._C.ProcessGroup.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <vector>

#include "bindings/collectives.h"
#include "libddp/group/sparse_all_reduce.h"

namespace py = pybind11;

namespace libddp {
namespace {

using Tensors = std::vector<at::Tensor>;

/// `op` of Python: the enumeration, or a ReduceOp object (PREMUL_SUM carries its factor in one).
c10d::ReduceOp cast_reduce_op(py::handle op) {
  using Enumerator = c10d::ReduceOp::RedOpType;
  // It is nearly always the one before. Never freed: enumerators are not either.
  static PyObject* last = nullptr;
  static Enumerator value = Enumerator::SUM;
  if (op.ptr() == last) return c10d::ReduceOp(value);
  py::detail::make_caster<Enumerator> caster;
  if (!caster.load(op, /*convert=*/false)) {
    if (py::isinstance<c10d::ReduceOp>(op)) return op.cast<c10d::ReduceOp>();
    throw py::type_error("libddp: op is " + std::string(py::repr(op)) +
                         ", which is no ReduceOp. Hint: ReduceOp.SUM, for example.");
  }
  value = py::detail::cast_op<Enumerator>(caster);
  Py_XDECREF(last);
  last = op.inc_ref().ptr();
  return c10d::ReduceOp(value);
}

/// The input of a reduction that must not change: a multiplied copy for PREMUL_SUM, else itself.
at::Tensor unchanged_input(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (!is_premultiplied(op)) return tensor;
  at::Tensor copy = tensor.detach().clone();
  premultiply(op, copy);
  return copy;
}

py::object all_reduce_coalesced(ProcessGroup& self, const Tensors& tensors, py::handle op,
                                bool async, Timeout timeout) {
  const c10d::ReduceOp reduce = cast_reduce_op(op);
  return issue(self, c10d::OpType::ALLREDUCE_COALESCED, tensors, async, [&] {
    for (const at::Tensor& tensor : tensors) {
      if (is_premultiplied(reduce)) premultiply(reduce, tensor);
    }
    return self.all_reduce_coalesced(tensors, {.op = reduce_op(reduce)},
                                     options_of(async, timeout));
  });
}

py::object reduce(ProcessGroup& self, const at::Tensor& tensor, int root, py::handle op, bool async,
                  Timeout timeout) {
  const c10d::ReduceOp reduce = cast_reduce_op(op);
  return issue(self, c10d::OpType::REDUCE, {tensor}, async, [&] {
    const bool is_root = self.rank() == root;
    if (is_root && is_premultiplied(reduce)) premultiply(reduce, tensor);
    const at::Tensor input = is_root ? tensor : unchanged_input(tensor, reduce);
    WorkPtr work = self.reduce(input, root, {.op = reduce_op(reduce)}, options_of(async, timeout));
    note_reduced(reduce, {tensor});
    return work;
  });
}

py::object reduce_scatter(ProcessGroup& self, const at::Tensor& output, const Tensors& inputs,
                          py::handle op, bool async, Timeout timeout) {
  const c10d::ReduceOp reduce = cast_reduce_op(op);
  return issue(self, c10d::OpType::REDUCE_SCATTER, {output}, async, [&] {
    Tensors parts;
    for (const at::Tensor& input : inputs) parts.push_back(unchanged_input(input, reduce));
    return self.reduce_scatter(output, parts, {.op = reduce_op(reduce)},
                               options_of(async, timeout));
  });
}

void sparse(ProcessGroup& self, const at::Tensor& tensor) {
  sparse_all_reduce(self, {tensor}, {});
  note_written(c10d::OpType::_ALLREDUCE_SPARSE, {tensor});
}

}  // namespace

py::object all_reduce(ProcessGroup& self, const at::Tensor& tensor, py::handle op, bool async,
                      Timeout timeout, std::string_view label) {
  const c10d::ReduceOp reduce = cast_reduce_op(op);
  const CallOptions options = options_of(async, timeout, label);
  return issue(self, c10d::OpType::ALLREDUCE, {tensor}, async, [&] {
    if (is_premultiplied(reduce)) premultiply(reduce, tensor);
    WorkPtr work = self.all_reduce(tensor, {.op = reduce_op(reduce)}, options);
    note_reduced(reduce, {tensor});
    return work;
  });
}

py::object reduce_scatter_into(ProcessGroup& self, const at::Tensor& output,
                               const at::Tensor& input, py::handle op, bool async,
                               Timeout timeout) {
  const c10d::ReduceOp reduce = cast_reduce_op(op);
  return issue(self, c10d::OpType::_REDUCE_SCATTER_BASE, {output}, async, [&] {
    return self.reduce_scatter_into(output, unchanged_input(input, reduce),
                                    {.op = reduce_op(reduce)}, options_of(async, timeout));
  });
}

void bind_reductions(GroupClass& group) {
  const auto sum = py::cast(c10d::ReduceOp::SUM);
  group
      .def("all_reduce", &all_reduce, py::arg("tensor"), py::arg("op") = sum,
           py::arg("async_op") = false, py::arg("timeout") = py::none(), py::arg("label") = "",
           "Reduces over all ranks, in place. `label` appears in errors.")
      .def("all_reduce_coalesced", &all_reduce_coalesced, py::arg("tensors"), py::arg("op") = sum,
           py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "One collective over several tensors of one dtype.")
      .def("all_reduce_sparse", &sparse, py::arg("tensor"),
           py::call_guard<py::gil_scoped_release>(), "SUM of sparse COO tensors, in place.")
      .def("reduce", &reduce, py::arg("tensor"), py::arg("root"), py::arg("op") = sum,
           py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "As all_reduce; the result is defined on `root` (a rank of this group) only.")
      .def("reduce_scatter", &reduce_scatter, py::arg("output"), py::arg("inputs"),
           py::arg("op") = sum, py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "Reduces one input per rank; each rank gets its own.")
      .def("reduce_scatter_into", &reduce_scatter_into, py::arg("output"), py::arg("input"),
           py::arg("op") = sum, py::arg("async_op") = false, py::arg("timeout") = py::none(),
           "As reduce_scatter, with the inputs as blocks of one tensor.");
}

}  // namespace libddp
