// One way in: a fallback at the dispatch key `Fake`, which handles every operator, whatever kernels it has, and operators
// registered later, too. Typed kernels take precedence over it for the operators that programs call most.
//
// PyTorch has no fallback there up to 2.15. It is going to register one for fake tensors in C++, and then this way in is
// closed: a key can have only one.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>

#include <algorithm>

#include "typed_kernels.h"

namespace dtrrun {

class FakeWay {
 public:
  // Registers the fallback and kernels for the lifetime of the process. Raises c10::Error if there is a fallback already.
  static void install() {
    auto& dispatcher = c10::Dispatcher::singleton();
    static auto& handles = *new std::vector<c10::RegistrationHandleRAII>;
    auto fallback = c10::KernelFunction::makeFromBoxedFunction<&interpose_boxed>();
    handles.push_back(dispatcher.registerFallback(DispatchKey::Fake, std::move(fallback), OURS));
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      auto op = dispatcher.findSchema(name);
      if (!op || op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) continue;
      if (auto kernel = TypedKernels::made_for(*op, &interpose))
        handles.push_back(dispatcher.registerImpl(name, DispatchKey::Fake, std::move(*kernel), std::nullopt, nullptr, OURS));
    }
    way_in = WayIn("fake", DispatchKey::Fake, after(DispatchKey::Fake).remove(DispatchKey::Python), IS_ABOVE_PYTHON);
  }

  static void interpose(Arrival& arrival) {
    if (IS_ABOVE_PYTHON && arrival.keys.has(DispatchKey::Python)) {
      if (is_for_python(arrival)) return to_python_first(arrival);
      arrival.keys = arrival.keys.remove(DispatchKey::Python);
    }
    arrive(arrival);
  }

 private:
  // PyTorch includes this text in its error when another fallback is registered there.
  static constexpr const char* OURS = "by dtrrun, which leaves this key alone with DTRRUN_WAY_IN=custom-rng";
  static constexpr bool IS_ABOVE_PYTHON = DispatchKey::Fake > DispatchKey::Python;  // before 2.13

  static constexpr DispatchKeySet after(DispatchKey key) { return DispatchKeySet(DispatchKeySet::FULL_AFTER, key); }

  static void interpose_boxed(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    BoxedArrival arrival(op, keys, stack);
    interpose(arrival);
  }

  // Returns true if an operator must go to a mode or to a subclass's `__torch_dispatch__`.
  static bool is_for_python(Arrival& arrival) {
    if (c10::impl::TorchDispatchModeTLS::stack_len() > 0) return true;
    c10::ArrayRef<c10::IValue> values(arrival.values(), arrival.count);
    return std::any_of(values.begin(), values.end(), [](const c10::IValue& value) {
      if (value.isTensor()) return has_python_key(value.toTensor());
      if (!value.isTensorList() && !value.isOptionalTensorList()) return false;
      auto items = value.toListRef();
      return std::any_of(items.begin(), items.end(), [](const c10::IValue& item) {
        return item.isTensor() && has_python_key(item.toTensor());
      });
    });
  }

  // Does what PyTorch's fallback for `Python` does, but leaves our key switched on. So operators that the program's mode or
  // subclass calls arrive in turn.
  static void to_python_first(Arrival& arrival) {
    if (arrival.op.hasKernelForDispatchKey(DispatchKey::Python)) {
      arrival.run(arrival.keys & after(DispatchKey::Fake));
      return;
    }
    constexpr DispatchKeySet python(DispatchKey::Python);
    static const auto hidden =
        (DispatchKeySet(DispatchKeySet::FULL) ^ (after(DispatchKey::Python) | python)).remove(DispatchKey::Fake);
    c10::impl::ExcludeDispatchKeyGuard exclude(hidden);
    const char* name = c10::impl::TorchDispatchModeTLS::stack_len() > 0 ? "PythonDispatchMode" : "PythonSubclass";
    Stack stack = arrival.copied();
    RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>(stack.data(), stack.size()));
    (*getPyInterpreter())->dispatch(arrival.op, &stack);
    arrival.set_results(std::move(stack));
  }
};

}  // namespace dtrrun
