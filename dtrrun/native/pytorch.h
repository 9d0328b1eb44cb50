// What PyTorch's versions have in different places, or not at all.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Storage.h>
#include <torch/version.h>

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
    bool excluded = c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Tracer);
    c10::impl::tls_set_dispatch_key_excluded(c10::DispatchKey::Tracer, false);  // PyTorch refuses it otherwise
    torch::jit::tracer::setTracingState(state);
    c10::impl::tls_set_dispatch_key_excluded(c10::DispatchKey::Tracer, excluded);
  }
  State state_;
};

inline bool has_python_key(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
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
