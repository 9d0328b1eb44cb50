// What PyTorch's versions have in different places, or not at all.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/Storage.h>
#include <torch/version.h>

#include <algorithm>
#include <memory>
#include <new>
#include <type_traits>

// Of torch/csrc/jit/frontend/tracer.h.
namespace torch::jit::tracer {
struct TracingState;
TORCH_API const std::shared_ptr<TracingState>& getTracingState();
TORCH_API void setTracingState(std::shared_ptr<TracingState> state);
}  // namespace torch::jit::tracer

namespace dtrrun {

using c10::DispatchKey;
using c10::DispatchKeySet;

// -- the key of the interposer ---------------------------------------------------------------------------------

constexpr DispatchKey KEY = DispatchKey::Fake;  // which PyTorch itself does not use
constexpr bool ABOVE_PYTHON = KEY > DispatchKey::Python;  // before 2.13
const DispatchKeySet below = DispatchKeySet(DispatchKeySet::FULL_AFTER, KEY).remove(DispatchKey::Python);
const DispatchKeySet above = DispatchKeySet(DispatchKeySet::FULL) - below;

// While an operator is here, what its kernel calls is not.
class Off {
 public:
  Off() { depth++; }
  ~Off() { depth--; }
  Off(const Off&) = delete;
  static bool none() { return depth == 0; }

 private:
  static inline thread_local int depth = 0;
  c10::impl::ExcludeDispatchKeyGuard guard_{KEY};
};

// Lets this thread's operators come, or not. Where our key stands above Python's, it is off in the handler of a mode or a
// subclass that has been called before: what that calls is to come, too.
inline void switch_key(bool on) {
  c10::impl::tls_set_dispatch_key_included(KEY, on);
  if (ABOVE_PYTHON && on && Off::none()) c10::impl::tls_set_dispatch_key_excluded(KEY, false);
}

// `torch.jit.trace` also records what is asked of a tensor without an operator, its sizes for one. While Python code of ours
// looks at the program's tensors, nothing is traced.
class Untraced {
 public:
  Untraced() : state_(torch::jit::tracer::getTracingState()) {
    if (state_) set(nullptr);
  }
  ~Untraced() {
    if (state_) set(state_);
  }
  Untraced(const Untraced&) = delete;

 private:
  using State = std::shared_ptr<torch::jit::tracer::TracingState>;
  static void set(const State& state) {
    bool excluded = c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Tracer);
    c10::impl::tls_set_dispatch_key_excluded(DispatchKey::Tracer, false);  // PyTorch refuses it otherwise
    torch::jit::tracer::setTracingState(state);
    c10::impl::tls_set_dispatch_key_excluded(DispatchKey::Tracer, excluded);
  }
  State state_;
};

inline bool has_python_key(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(DispatchKey::Python);
}

// Whether an operator is for a mode or for a subclass's `__torch_dispatch__`.
inline bool is_for_python(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0) return true;
  auto values = torch::jit::last(stack, op.schema().arguments().size());
  return std::any_of(values.begin(), values.end(), [](const c10::IValue& value) {
    if (value.isTensor()) return has_python_key(value.toTensor());
    if (!value.isTensorList() && !value.isOptionalTensorList()) return false;
    auto items = value.toListRef();
    return std::any_of(items.begin(), items.end(), [](const c10::IValue& item) {
      return item.isTensor() && has_python_key(item.toTensor());
    });
  });
}

// Where our key stands above Python's: does what PyTorch's fallback for that one does, but leaves ours switched on. So what
// the program's mode or subclass calls comes to us in turn.
inline void to_python_first(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  if (op.hasKernelForDispatchKey(DispatchKey::Python)) {
    op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, KEY), stack);
    return;
  }
  constexpr DispatchKeySet python(DispatchKey::Python), after_python(DispatchKeySet::FULL_AFTER, DispatchKey::Python);
  static const auto hidden = (DispatchKeySet(DispatchKeySet::FULL) ^ (after_python | python)).remove(KEY);
  c10::impl::ExcludeDispatchKeyGuard exclude(hidden);
  const char* name = c10::impl::TorchDispatchModeTLS::stack_len() > 0 ? "PythonDispatchMode" : "PythonSubclass";
  RECORD_FUNCTION(name, torch::jit::last(*stack, op.schema().arguments().size()));
  (*getPyInterpreter())->dispatch(op, stack);
}

// -- storages --------------------------------------------------------------------------------------------------

// Swaps what two storages hold, without a copy. Before 2.13, PyTorch has no function for it.
template <class Storage>
void swap_memory(Storage& one, Storage& other) {
  if constexpr (requires { one.swap_data_ptr(other); }) {
    one.swap_data_ptr(other);
  } else {
    size_t nbytes = one.nbytes();
    bool resizable = one.resizable();
    at::Allocator* allocator = one.allocator();
    at::DataPtr memory = other.set_data_ptr(at::DataPtr(nullptr, other.device()));
    other.set_data_ptr_noswap(one.set_data_ptr(std::move(memory)));
    one.set_nbytes(other.nbytes());
    one.set_allocator(other.allocator());
    one.set_resizable(other.resizable());
    other.set_nbytes(nbytes);
    other.set_allocator(allocator);
    other.set_resizable(resizable);
  }
}

// The object that Python has for a tensor or a storage, or null.
template <class Slot>
PyObject* object_in(const Slot* slot) {
  if constexpr (requires { slot->load_pyobj(); }) {
    return slot->load_pyobj();
  } else {  // before 2.10
    return slot->check_pyobj(/*ignore_hermetic_tls=*/true).value_or(nullptr);
  }
}

// Makes `object`, whose memory is cleared, hold a storage.
template <class Object>
void fill_object(Object* object, const c10::Storage& storage) {
  using Held = decltype(object->cdata);
  if constexpr (std::is_same_v<Held, c10::Storage>) {
    new (&object->cdata) Held(storage);
  } else {  // before 2.10, it may also be borrowed
    new (&object->cdata) Held(Held::owned(c10::Storage(storage)));
  }
}

// -- the precision of float32 ----------------------------------------------------------------------------------

// Writes the precision of a backend's matrix products, convolutions and recurrent layers, and the one that they inherit, as
// numbers. Returns where to go on.
inline int* add_precisions(at::Context& context, bool cuda, int* next) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
  using at::Float32Op, at::Float32Backend;
  for (Float32Op op : {Float32Op::MATMUL, Float32Op::CONV, Float32Op::RNN, Float32Op::ALL})
    *next++ = static_cast<int>(context.float32Precision(cuda ? Float32Backend::CUDA : Float32Backend::MKLDNN, op));
#else
  for (const char* op : {"matmul", "conv", "rnn", "all"})  // "ieee", "tf32", "bf16" or "none"
    *next++ = context.float32Precision(cuda ? "cuda" : "mkldnn", op)[0];
#endif
  return next;
}

}  // namespace dtrrun
