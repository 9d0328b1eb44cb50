// An operator that has arrived: its arguments, its kernel and its results, as the dispatcher passes them.
//
// A fallback gets the arguments on a stack (`BoxedArrival`); a typed kernel gets them as the caller passed them
// (`typed_kernels.h`). The code that handles operators does not depend on which.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <utility>

#include "way_in.h"

namespace dtrrun {

using c10::IValue;
using Tensors = c10::SmallVector<at::Tensor, 4>;

class Arrival {
 public:
  const OperatorHandle& op;
  DispatchKeySet keys;  // that it was called with
  const size_t count;   // of its arguments

  Arrival(const Arrival&) = delete;

  // Returns its arguments. Valid until its kernel runs.
  virtual const IValue* values() = 0;
  // Returns the first argument if it is a tensor, else null.
  virtual const at::Tensor* first() = 0;

  // Runs its kernel: dispatches on the keys `below`.
  virtual void run(DispatchKeySet below) = 0;
  void run() { run(keys & WayIn::BELOW); }
  // For running it again after it has failed: `keep` saves its arguments, `restore` brings them back.
  virtual void keep() = 0;
  virtual void restore() = 0;

  // Return what its kernel has returned: the tensors in it, or all of it.
  virtual Tensors tensors() const = 0;
  virtual Stack results() const = 0;
  // Replaces what its kernel has returned.
  virtual void set_results(Stack&& results) = 0;

  const c10::FunctionSchema& schema() const { return op.schema(); }
  // Returns a copy of its arguments, for another call.
  Stack copied() { return Stack(values(), values() + count); }

 protected:
  Arrival(const OperatorHandle& op, DispatchKeySet keys, size_t count) : op(op), keys(keys), count(count) {}
  ~Arrival() = default;
};

// Adds the tensors in a result, in order (`outputs_of` in dispatch/arguments.py).
inline void add_tensors(const at::Tensor& tensor, Tensors& tensors) {
  if (tensor.defined()) tensors.push_back(tensor);
}
inline void add_tensors(const std::vector<at::Tensor>& list, Tensors& tensors) {
  for (const at::Tensor& tensor : list) add_tensors(tensor, tensors);
}
inline void add_tensors(const IValue& value, Tensors& tensors) {
  if (value.isTensor()) add_tensors(value.toTensor(), tensors);
  if (value.isTensorList()) add_tensors(value.toTensorVector(), tensors);
}

class BoxedArrival final : public Arrival {
 public:
  // stack: has the arguments on top, where the results will go.
  BoxedArrival(const OperatorHandle& op, DispatchKeySet keys, Stack* stack)
      : Arrival(op, keys, op.schema().arguments().size()), stack_(stack), below_(stack->size() - count) {}

  const IValue* values() override { return stack_->data() + below_; }
  const at::Tensor* first() override {
    return count != 0 && values()->isTensor() ? &values()->toTensor() : nullptr;
  }
  using Arrival::run;
  void run(DispatchKeySet below) override { op.redispatchBoxed(below, stack_); }
  void keep() override { kept_.assign(stack_->begin() + below_, stack_->end()); }
  void restore() override {
    stack_->resize(below_);
    stack_->insert(stack_->end(), kept_.begin(), kept_.end());
  }
  Tensors tensors() const override {
    Tensors found;
    for (size_t place = below_; place < stack_->size(); place++) add_tensors((*stack_)[place], found);
    return found;
  }
  Stack results() const override { return Stack(stack_->begin() + below_, stack_->end()); }
  void set_results(Stack&& results) override {
    stack_->resize(below_);
    for (IValue& value : results) stack_->push_back(std::move(value));
  }

 private:
  Stack* const stack_;
  const size_t below_;  // the number of values on the stack that belong to others
  Stack kept_;
};

}  // namespace dtrrun
