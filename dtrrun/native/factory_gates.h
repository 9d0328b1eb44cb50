// Gates in front of the factories that programs and PyTorch's kernels call most. They pass arguments on unboxed, whereas other
// gates (`way_in.cpp`) box them, which takes a quarter of a microsecond.
//
// PyTorch does not expose the kernel at `BackendSelect` in a form that can be called unboxed. But all of these kernels are
// generated and do the same thing: they select the backend by the arguments and redispatch the operator to it.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorOptions.h>

#include <memory>
#include <optional>
#include <string_view>
#include <tuple>

#include "typed_kernels.h"

namespace dtrrun {

class FactoryGates {
 public:
  // Returns true if a kernel at `BackendSelect` is a generated one. registered: PyTorch's text on where it was registered.
  static bool is_generated(std::string_view registered) { return registered.find("RegisterBackendSelect") != registered.npos; }

  // Returns the gate in front of an operator's generated kernel; nullopt if there is none for this operator.
  static std::optional<c10::KernelFunction> made_for(const c10::OperatorHandle& op) {
    namespace ops = at::_ops;
    return first<ops::empty_memory_format, ops::empty_strided, ops::zeros, ops::ones, ops::full, ops::arange, ops::rand,
                 ops::randn>(op);
  }

 private:
  template <class Factory, class Signature = typename Factory::schema>
  class Gate;

  template <class Factory, class Result, class... Args>
  class Gate<Factory, Result(Args...)> final : public c10::OperatorKernel {
   public:
    explicit Gate(const c10::OperatorHandle& op) : kernel_(op) {}
    Result operator()(c10::DispatchKeySet keys, Args... args) {
      if (WayIn::is_for_us(keys)) return kernel_(keys, args...);
      return Factory::redispatch(c10::DispatchKeySet(backend(args...)), args...);
    }

   private:
    static c10::DispatchKey backend(const Args&... args) {
      std::tuple<const Args&...> all(args...);
      return c10::computeDispatchKey(std::get<const std::optional<at::ScalarType>&>(all),
                                     std::get<const std::optional<at::Layout>&>(all),
                                     std::get<const std::optional<at::Device>&>(all));
    }
    TypedKernels::Kernel<Result(Args...)> kernel_;
  };

  template <class... Factories>
  static std::optional<c10::KernelFunction> first(const c10::OperatorHandle& op) {
    std::optional<c10::KernelFunction> found;
    ((is<Factories>(op) && (found = made<Factories>(op), true)) || ...);
    return found;
  }
  template <class Factory>
  static bool is(const c10::OperatorHandle& op) {
    const c10::OperatorName& name = op.operator_name();
    return name.name == static_cast<const char*>(Factory::name) &&
           name.overload_name == static_cast<const char*>(Factory::overload_name);
  }
  template <class Factory>
  static c10::KernelFunction made(const c10::OperatorHandle& op) {
    return c10::KernelFunction::makeFromUnboxedFunctor<false, Gate<Factory>>(std::make_unique<Gate<Factory>>(op));
  }
};

}  // namespace dtrrun
