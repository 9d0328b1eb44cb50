// One call on the fast path (`Interposer::fast`), on its way through `describe.h`, `writes.h`, `record.h` and `run_kernel.h`.
#pragma once

#include <optional>

#include "device.h"
#include "first_calls.h"
#include "operator_table.h"
#include "pytorch.h"
#include "recipe.h"
#include "turns.h"
#include "way_in.h"

namespace dtrrun {

// Some recipe reads the inputs of this operation.
inline void mark_used(PyObject* maker) {
  for (PyObject* source : OperationFields::inputs(maker)) VersionFields().used.set(source, true);
}

// Python looks at these, and knows what to do with those that are not plain tensors over a storage.
inline bool is_plain_kind(const at::Tensor& tensor, const Device& device) {
  auto keys = tensor.unsafeGetTensorImpl()->key_set();
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !keys.has(DispatchKey::NestedTensor) &&
         !keys.has(DispatchKey::ZeroTensor) && device.has(tensor.device());
}

struct FastCall {
  OperatorInfo& info;
  const OperatorHandle& op;
  Stack* stack;
  Turn& turn;
  size_t count = op.schema().arguments().size(), first = stack->size() - count;  // of its arguments
  int64_t clock = 0;                               // when it came
  c10::SmallVector<Ref, 6> inputs;                 // the versions of its tensors; afterwards the recipe's
  bool inputs_resident = false;
  bool excludes = false;                           // it updates running statistics, which a replay leaves out
  c10::SmallVector<int, 8> holes = c10::SmallVector<int, 8>(count, VALUE);  // as in `Recipe`
  c10::SmallVector<std::pair<size_t, IValue>, 1> gaps;  // which items of a list of tensors there are
  Ref signature, state;
  c10::SmallVector<Ref, 2> statistics;  // the versions of running statistics, which are not among the inputs
  struct Write {
    size_t place, item, input;  // of the argument, and in it, if that is a list; of the version among the inputs
    bool overwrites = false;    // all of it, without reading it
    PyObject* target = nullptr;
  };
  c10::SmallVector<Write, 2> written;  // what it writes to; several tensors may be over one storage
  c10::SmallVector<Write, 2> targets;  // once it is certain that it will: one for each version
  bool recordable = true;              // these can be computed again afterwards
  Ref maker;                       // its recipe, if it will have one
  c10::SmallVector<std::pair<Py_ssize_t, Ref>, 2> made;  // the versions that this makes, and where; unless it is only one
  c10::SmallVector<Ref, 2> overwritten;  // what it does not read
  Ref rng;                         // the state of the generator that it draws from
  Ref outputs;                     // those that Python has entered
  bool is_first = false;           // of its signature
  std::optional<FirstCalls::Unpriced> unpriced;  // until it has run

  const IValue& argument(size_t place) const { return (*stack)[first + place]; }
  at::Tensor tensor(const Write& one) const {
    const IValue& value = argument(one.place);
    return value.isTensor() ? value.toTensor() : value.toListRef()[one.item].toTensor();
  }

  // Whether what the call makes, or writes to, can be computed again.
  bool has_recipe() const {
    return targets.empty() || recordable;
  }
  // Calls `function` with each version that a call reads, also after `record`.
  template <class Function>
  void each_input(const Function& function) const {
    for (const Ref& one : inputs) function(one.get());
    if (!maker) return;  // which has taken them
    for (PyObject* one : OperationFields::inputs(maker.get())) function(one);
  }
};

}  // namespace dtrrun
