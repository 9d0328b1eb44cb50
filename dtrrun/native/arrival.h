// An operator that has arrived: its arguments, its kernel and its results, as the dispatcher passes them.
//
// A boxed kernel gets the arguments on a stack (`BoxedArrival`); a typed kernel gets them as the caller passed them
// (`typed_kernels.h`). The code that handles operators does not depend on which.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <utility>

#include "device.h"
#include "placeholders.h"
#include "storages.h"
#include "way_in.h"

namespace dtrrun {

using c10::IValue;
using Tensors = c10::SmallVector<at::Tensor, 4>;

// What a session counts: storages of its own on its device, whether they are in memory or not, or only those that are.
struct Ours {
  const OwnStorages& own;
  const Device& device;
  bool in_memory = false;
};

// A hash of what the bytes of a call's results mostly depend on: the sizes of its tensors, and sizes among its arguments.
struct SizesHash {
  uint64_t hash = 0;

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    add(tensor.sizes());
    mix(static_cast<uint64_t>(tensor.scalar_type()) << 32);
  }
  void add(const std::optional<at::Tensor>& tensor) {
    if (tensor) add(*tensor);
  }
  void add(c10::IntArrayRef sizes) {
    for (int64_t size : sizes) mix(static_cast<uint64_t>(size));
  }
  void add(c10::SymIntArrayRef sizes) {
    if (auto known = c10::asIntArrayRefSlowOpt(sizes)) add(*known);
  }
  template <class Tensors>
  void add_each(const Tensors& list) {
    for (const at::Tensor& tensor : list) add(tensor);
  }
  void add(const at::ITensorListRef& list) { add_each(list); }
  void add(at::TensorList list) { add_each(list); }
  void add(const IValue& value) {
    if (value.isTensor()) return add(value.toTensor());
    if (value.isIntList()) return add(value.toDimVector());
    if (!value.isList() || !(value.isTensorList() || value.isOptionalTensorList())) return;
    for (const IValue& item : value.toListRef())
      if (item.isTensor()) add(item.toTensor());
  }
  template <class Argument>
  void add(const Argument&) {}

 private:
  void mix(uint64_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15ull + 1; }
};

class Arrival {
 public:
  const OperatorHandle& op;
  DispatchKeySet keys;  // that it was called with
  const size_t count;   // of its arguments

  Arrival(const Arrival&) = delete;

  // Returns its arguments. Valid until its kernel runs.
  virtual const IValue* values() = 0;
  // Returns an argument for a recipe to keep.
  virtual IValue kept(const IValue& value) const = 0;
  // Returns the first argument if it is a tensor, else null.
  virtual const at::Tensor* first() = 0;

  // Runs its kernel: dispatches on the keys `below`.
  virtual void run(DispatchKeySet below) = 0;
  void run() { run(keys & WayIn::BELOW); }
  // For running it again after it has failed: `keep` saves its arguments, `restore` brings them back, `drop` forgets them.
  virtual void keep() = 0;
  virtual void restore() = 0;
  virtual void drop() = 0;

  // Return what its kernel has returned: the tensors in it, or all of it.
  virtual Tensors tensors() const = 0;
  virtual Stack results() const = 0;
  // Replaces what its kernel has returned.
  virtual void set_results(Stack&& results) = 0;

  // For operators that are only counted (counting.h). Returns whether all its tensors are plain ones on the session's device, whose
  // bytes it counts already, or numbers of the program, and whether it names no other device.
  virtual bool is_known(const Ours& ours) = 0;
  // Returns a hash of the sizes among its arguments.
  virtual uint64_t hash_of_sizes() = 0;
  // Counts the storages that its kernel has made. Returns false if a result is not plain.
  virtual bool count_results(OwnStorages& own) = 0;

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

// `Arrival::is_known`, for one argument.
inline bool is_known(const at::Tensor& tensor, const Ours& ours) {
  if (!tensor.defined()) return true;
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->is_wrapped_number()) return true;
  constexpr DispatchKeySet others(
      {DispatchKey::Python, DispatchKey::NestedTensor, DispatchKey::Quantized, DispatchKey::ZeroTensor});
  if (impl->key_set().has_any(others) || !impl->has_storage()) return false;
  const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return ours.device.has(impl->device()) && ours.own.knows(storage) && !(ours.in_memory && is_empty(storage));
}
inline bool is_known(const std::optional<at::Tensor>& tensor, const Ours& ours) { return !tensor || is_known(*tensor, ours); }
inline bool is_known(const std::optional<c10::Device>& named, const Ours& ours) {
  return !named || ours.device.is_meant_by(*named);
}
template <class Tensors>
bool are_known(const Tensors& list, const Ours& ours) {
  for (const at::Tensor& tensor : list)
    if (!is_known(tensor, ours)) return false;
  return true;
}
inline bool is_known(const at::ITensorListRef& list, const Ours& ours) { return are_known(list, ours); }
inline bool is_known(at::TensorList list, const Ours& ours) { return are_known(list, ours); }
inline bool is_known(const IValue& value, const Ours& ours) {
  if (value.isTensor()) return is_known(value.toTensor(), ours);
  if (value.isDevice()) return ours.device.is_meant_by(value.toDevice());
  if (!value.isList() || !(value.isTensorList() || value.isOptionalTensorList())) return true;
  for (const IValue& item : value.toListRef())
    if (item.isTensor() && !is_known(item.toTensor(), ours)) return false;
  return true;
}
template <class Argument>
bool is_known(const Argument&, const Ours&) {
  return true;
}

// `Arrival::count_results`, for one result.
inline bool count_new(const at::Tensor& tensor, OwnStorages& own) {
  if (!tensor.defined()) return true;
  if (!tensor.unsafeGetTensorImpl()->has_storage()) return false;
  c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (!OwnStorages::is_plain(storage)) return own.knows(storage);
  own.count(storage);
  return true;
}
inline bool count_new(const std::vector<at::Tensor>& list, OwnStorages& own) {
  bool all = true;
  for (const at::Tensor& tensor : list) all = count_new(tensor, own) && all;
  return all;
}
inline bool count_new(const IValue& value, OwnStorages& own) {
  bool all = true;
  if (value.isTensor()) return count_new(value.toTensor(), own);
  if (value.isTensorList())
    for (const IValue& item : value.toListRef()) all = count_new(item.toTensor(), own) && all;
  return all;
}

// Counts what `torch.tensor` has made, which hides how, and has filled by address. Returns false if it is not plain memory of the CPU's
// allocator.
inline bool count_filled(const at::Tensor& made, OwnStorages& own) {
  if (!made.defined() || !made.unsafeGetTensorImpl()->has_storage() || !made.is_cpu()) return false;
  c10::StorageImpl* storage = made.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (!OwnStorages::is_plain(storage) || storage->data_ptr().get_deleter() != c10::GetCPUAllocator()->raw_deleter()) return false;
  own.count(storage);
  return true;
}

class BoxedArrival final : public Arrival {
 public:
  // stack: has the arguments on top, where the results will go.
  BoxedArrival(const OperatorHandle& op, DispatchKeySet keys, Stack* stack)
      : Arrival(op, keys, op.schema().arguments().size()), stack_(stack), below_(stack->size() - count) {}

  const IValue* values() override { return stack_->data() + below_; }
  // TorchScript passes the program's own lists, which the program may change later.
  IValue kept(const IValue& value) const override { return value.isList() && value.use_count() > 1 ? value.deepcopy() : value; }
  const at::Tensor* first() override { return count != 0 && values()->isTensor() ? &values()->toTensor() : nullptr; }
  using Arrival::run;
  void run(DispatchKeySet below) override { op.redispatchBoxed(below, stack_); }
  void keep() override { kept_.assign(stack_->begin() + below_, stack_->end()); }
  void restore() override {
    stack_->resize(below_);
    stack_->insert(stack_->end(), kept_.begin(), kept_.end());
  }
  void drop() override { kept_.clear(); }
  bool is_known(const Ours& ours) override {
    const IValue* all = values();
    for (size_t place = 0; place < count; place++)
      if (!dtrrun::is_known(all[place], ours)) return false;
    return true;
  }
  uint64_t hash_of_sizes() override {
    SizesHash found;
    for (size_t place = 0; place < count; place++) found.add(values()[place]);
    return found.hash;
  }
  bool count_results(OwnStorages& own) override {
    bool all = true;
    for (size_t place = below_; place < stack_->size(); place++) all = count_new((*stack_)[place], own) && all;
    return all;
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
  c10::SmallVector<IValue, 8> kept_;
};

}  // namespace dtrrun
