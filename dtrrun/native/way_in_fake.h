// One way in: a fallback at the dispatch key `Fake`. It handles every operator, whatever kernels that has, and later ones too.
//
// PyTorch has no fallback there up to 2.15. It is going to register one for fake tensors in C++, and then this way is closed:
// a key can have only one.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>

#include <algorithm>

#include "way_in.h"

namespace dtrrun {

class FakeWay {
 public:
  // Registers the fallback, for as long as the process lives. Raises c10::Error if there is one.
  static void install() {
    // PyTorch shows this text to whoever wants to register another fallback there.
    static auto& handle = *new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerFallback(
        DispatchKey::Fake, c10::KernelFunction::makeFromBoxedFunction<&interpose>(),
        "by dtrrun, which leaves this key alone with DTRRUN_WAY_IN=custom-rng"));
    way_in = WayIn("fake", DispatchKey::Fake, after(DispatchKey::Fake).remove(DispatchKey::Python), IS_ABOVE_PYTHON);
  }

 private:
  static constexpr bool IS_ABOVE_PYTHON = DispatchKey::Fake > DispatchKey::Python;  // before 2.13

  static constexpr DispatchKeySet after(DispatchKey key) { return DispatchKeySet(DispatchKeySet::FULL_AFTER, key); }

  static void interpose(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (IS_ABOVE_PYTHON && keys.has(DispatchKey::Python)) {
      if (is_for_python(op, *stack)) return to_python_first(op, keys, stack);
      keys = keys.remove(DispatchKey::Python);
    }
    arrive(op, keys, stack);
  }

  // Whether an operator is for a mode or for a subclass's `__torch_dispatch__`.
  static bool is_for_python(const OperatorHandle& op, const Stack& stack) {
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

  // Does what PyTorch's fallback for `Python` does, but leaves our key switched on. So what the program's mode or subclass
  // calls comes to us in turn.
  static void to_python_first(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (op.hasKernelForDispatchKey(DispatchKey::Python)) {
      op.redispatchBoxed(keys & after(DispatchKey::Fake), stack);
      return;
    }
    constexpr DispatchKeySet python(DispatchKey::Python);
    static const auto hidden =
        (DispatchKeySet(DispatchKeySet::FULL) ^ (after(DispatchKey::Python) | python)).remove(DispatchKey::Fake);
    c10::impl::ExcludeDispatchKeyGuard exclude(hidden);
    const char* name = c10::impl::TorchDispatchModeTLS::stack_len() > 0 ? "PythonDispatchMode" : "PythonSubclass";
    RECORD_FUNCTION(name, torch::jit::last(*stack, op.schema().arguments().size()));
    (*getPyInterpreter())->dispatch(op, stack);
  }
};

}  // namespace dtrrun
