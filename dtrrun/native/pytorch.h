// What PyTorch's versions have in different places, or not at all.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

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

}  // namespace dtrrun
