// What differs between PyTorch's versions, or is missing in some.
#pragma once

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/version.h>

#include <memory>
#include <new>
#include <type_traits>

// From torch/csrc/jit/frontend/tracer.h.
namespace torch::jit::tracer {
struct TracingState;
TORCH_API const std::shared_ptr<TracingState>& getTracingState();
TORCH_API void setTracingState(std::shared_ptr<TracingState> state);
}  // namespace torch::jit::tracer

namespace dtrrun {

// `torch.jit.trace` also records queries that are not operators, such as a tensor's sizes. Turns tracing off while our Python
// code looks at the program's tensors.
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

// Some of PyTorch's functions bypass the program's function modes, and call us with one active. Turns them off while our Python code
// looks at the program's tensors.
class WithoutFunctionModes {
 public:
  WithoutFunctionModes()
      : on_(at::impl::torch_function_mode_enabled()), before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    if (on_) at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~WithoutFunctionModes() {
    if (on_) at::impl::PythonTorchFunctionTLS::set_disabled_state(before_);
  }
  WithoutFunctionModes(const WithoutFunctionModes&) = delete;

 private:
  const bool on_;
  const at::impl::TorchFunctionDisabledState before_;
};

// Returns true for a defined tensor that is none of Python's own, and whose content is what its memory holds.
inline bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet others(
      {DispatchKey::Python, DispatchKey::NestedTensor, DispatchKey::Quantized, DispatchKey::ZeroTensor});
  return tensor.defined() && !tensor.unsafeGetTensorImpl()->key_set().has_any(others);
}

// -- storages --------------------------------------------------------------------------------------------------

// Swaps what two storages hold, without a copy. PyTorch has no function for it before 2.13.
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

// Returns the Python object of a tensor or a storage, or null.
template <class Slot>
PyObject* object_in(const Slot* slot) {
  if constexpr (requires { slot->load_pyobj(); }) {
    return slot->load_pyobj();
  } else {  // before 2.10
    return slot->check_pyobj(/*ignore_hermetic_tls=*/true).value_or(nullptr);
  }
}

// -- the precision of float32 ----------------------------------------------------------------------------------

// Sets whether cuBLAS may sum in half precision. option: a `CuBLASReductionOption`; before 2.10, a Boolean.
inline void set_sums(at::Context& context, void (at::Context::*set)(bool, bool), int option) {
  (context.*set)(option == 0, option != 2);
}
inline void set_sums(at::Context& context, void (at::Context::*set)(bool), int option) { (context.*set)(option != 0); }

// Returns the precision of a backend's matrix products, convolutions or recurrent layers, as a number. kind: 0, 1 or 2.
inline int read_precision(at::Context& context, bool cuda, int kind);
// Sets it. A value equal to the one that all of them inherit is set as inherited.
inline void write_precision(at::Context& context, bool cuda, int kind, int value);

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
inline constexpr at::Float32Op PRECISE[] = {at::Float32Op::MATMUL, at::Float32Op::CONV, at::Float32Op::RNN};
inline int read_precision(at::Context& context, bool cuda, int kind) {
  return static_cast<int>(context.float32Precision(cuda ? at::Float32Backend::CUDA : at::Float32Backend::MKLDNN, PRECISE[kind]));
}
inline void write_precision(at::Context& context, bool cuda, int kind, int value) {
  auto backend = cuda ? at::Float32Backend::CUDA : at::Float32Backend::MKLDNN;
  auto wanted = static_cast<at::Float32Precision>(value);
  bool inherits = wanted == context.float32Precision(backend, at::Float32Op::ALL);
  context.setFloat32Precision(backend, PRECISE[kind], inherits ? at::Float32Precision::NONE : wanted);
}
#else
inline constexpr const char *PRECISE[] = {"matmul", "conv", "rnn"}, *PRECISIONS[] = {"ieee", "tf32", "bf16", "none"};
inline int read_precision(at::Context& context, bool cuda, int kind) {
  return context.float32Precision(cuda ? "cuda" : "mkldnn", PRECISE[kind])[0];
}
inline void write_precision(at::Context& context, bool cuda, int kind, int value) {
  const char* backend = cuda ? "cuda" : "mkldnn";
  std::string wanted = *std::find_if(PRECISIONS, PRECISIONS + 4, [&](const char* one) { return one[0] == value; });
  context.setFloat32Precision(backend, PRECISE[kind], wanted == context.float32Precision(backend, "all") ? "none" : wanted);
}
#endif

}  // namespace dtrrun
