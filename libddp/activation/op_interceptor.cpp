#include "libddp/activation/op_interceptor.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <utility>

#include "libddp/base/check.h"

namespace libddp {
namespace {

using Modes = c10::impl::TorchDispatchModeTLS;
using Mode = c10::impl::PyObject_TorchDispatchMode;

/// Operators need not note the thread's dispatch keys before they ask the stack of modes: the
/// interceptor has noted them once, which spares each operator a turn through boxed arguments.
void note_no_keys() {
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::PythonTLSSnapshot, false);
}

/// Takes the top mode off the stack within its life. It must not stay there: operators written in
/// Python look for an interpreter in it.
class ModeAside {
 public:
  ModeAside() : mode_(Modes::pop_stack()) {}
  ~ModeAside() {
    Modes::push_non_infra_mode_onto_stack(std::move(mode_));
    note_no_keys();
  }
  ModeAside(const ModeAside&) = delete;
  ModeAside& operator=(const ModeAside&) = delete;

 private:
  std::shared_ptr<Mode> mode_;
};

[[noreturn]] void not_an_interpreter() {
  LIBDDP_CHECK(false, "a dispatch mode without Python was taken for an interpreter");
}

}  // namespace

/// Only `dispatch` and `detach` are ever called: no tensor names this interpreter, and there is no
/// Python object.
class OpInterceptor::Table : public c10::impl::PyInterpreterVTable {
  using Tensor = const c10::TensorImpl*;

 public:
  explicit Table(OpInterceptor& owner) : owner_(owner) {}

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    const ModeAside aside;
    owner_.on_op(op, stack);
  }

  std::string name() const override { return "libddp"; }
  void incref(PyObject*) const override {}
  void decref(PyObject*) const override {}
  bool try_incref(const c10::impl::PyObjectSlot&) const override { return false; }
  size_t refcnt(PyObject*) const override { return 1; }
  void reset_backward_hooks(const c10::TensorImpl*) const override {}

  /// A shallow copy, asked of the top mode too. The caller sets its version counter.
  c10::intrusive_ptr<c10::TensorImpl> detach(Tensor self) const override {
    const ModeAside aside;
    return self->shallow_copy_and_detach(c10::VariableVersion(0),
                                         /*allow_tensor_metadata_change=*/true);
  }

  void reportErrorCallback(PyObject*, c10::DispatchKey) const override { not_an_interpreter(); }
  void python_op_registration_trampoline(const c10::OperatorHandle&, c10::DispatchKey,
                                         c10::DispatchKeySet, torch::jit::Stack*, bool,
                                         bool) const override {
    not_an_interpreter();
  }
  void throw_abstract_impl_not_imported_error(std::string, const char*,
                                              const char*) const override {
    not_an_interpreter();
  }
  void python_dispatcher(const c10::OperatorHandle&, c10::DispatchKeySet,
                         torch::jit::Stack*) const override {
    not_an_interpreter();
  }
  bool is_contiguous(Tensor, at::MemoryFormat) const override { not_an_interpreter(); }
  c10::SymBool sym_is_contiguous(Tensor, at::MemoryFormat) const override { not_an_interpreter(); }
  bool is_strides_like(Tensor, at::MemoryFormat) const override { not_an_interpreter(); }
  bool is_non_overlapping_and_dense(Tensor) const override { not_an_interpreter(); }
  c10::Device device(Tensor) const override { not_an_interpreter(); }
  int64_t dim(Tensor) const override { not_an_interpreter(); }
  c10::IntArrayRef strides(Tensor) const override { not_an_interpreter(); }
  c10::IntArrayRef sizes(Tensor) const override { not_an_interpreter(); }
  c10::SymIntArrayRef sym_sizes(Tensor) const override { not_an_interpreter(); }
  c10::Layout layout(Tensor) const override { not_an_interpreter(); }
  int64_t numel(Tensor) const override { not_an_interpreter(); }
  c10::SymInt sym_numel(Tensor) const override { not_an_interpreter(); }
  c10::SymIntArrayRef sym_strides(Tensor) const override { not_an_interpreter(); }
  c10::SymInt sym_storage_offset(Tensor) const override { not_an_interpreter(); }

  using Kind = c10::DeviceType;
  void trace_gpu_event_creation(Kind, uintptr_t) const override {}
  void trace_gpu_event_deletion(Kind, uintptr_t) const override {}
  void trace_gpu_event_record(Kind, uintptr_t, uintptr_t) const override {}
  void trace_gpu_event_wait(Kind, uintptr_t, uintptr_t) const override {}
  void trace_gpu_memory_allocation(Kind, uintptr_t) const override {}
  void trace_gpu_memory_deallocation(Kind, uintptr_t) const override {}
  void trace_gpu_stream_creation(Kind, uintptr_t) const override {}
  void trace_gpu_device_synchronization(Kind) const override {}
  void trace_gpu_stream_synchronization(Kind, uintptr_t) const override {}
  void trace_gpu_event_synchronization(Kind, uintptr_t) const override {}

 private:
  OpInterceptor& owner_;
};

OpInterceptor::OpInterceptor()
    : table_(std::make_unique<Table>(*this)), interpreter_(table_.get()) {}

OpInterceptor::~OpInterceptor() = default;

void OpInterceptor::enter() {
  Modes::push_non_infra_mode_onto_stack(std::make_shared<Mode>(nullptr, &interpreter_));
  note_no_keys();
  keys_on_entry_.emplace();
}

void OpInterceptor::leave() {
  keys_on_entry_.reset();
  Modes::pop_stack();
}

}  // namespace libddp
