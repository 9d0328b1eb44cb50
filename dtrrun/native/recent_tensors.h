// The tensors that operators have made lately, and which of them somebody but autograd's graph holds (`runtime/patches/gathered.py`).
//
// Before weights leave that FSDP has gathered, what may be needed while they are away must be told from what only autograd has
// saved: that is needed in the backward pass, when they are back. Nothing else in PyTorch leads from a storage to its tensors. So
// while there are gathered weights, every result of an operator is noted, by a weak reference.
#pragma once

#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "arrival.h"
#include "pytorch.h"
#include "tensor_versions.h"

namespace torch::autograd {
TORCH_API int get_current_graph_task_id();  // from torch/csrc/autograd/graph_task.h
}

namespace dtrrun {

// Returns how many references Python code has to a tensor, to which the caller has one, too.
template <class Impl>
Py_ssize_t references_in_python(Impl* tensor) {
  auto* slot = tensor->pyobj_slot();
  PyObject* object = object_in(slot);
  if (object == nullptr) return 0;
  if constexpr (requires { slot->owns_pyobj(); })  // before 2.10: once Python has let go of the object, the tensor keeps it
    return Py_REFCNT(object) - (slot->owns_pyobj() ? 1 : 0);
  else
    return Py_REFCNT(object) - 1;  // the tensor has one
}

class RecentTensors {
 public:
  explicit RecentTensors(const TensorVersions& versions) : versions_(versions) {}

  bool is_on = false;

  void add(const Arrival& arrival) {
    for (const at::Tensor& tensor : arrival.tensors()) add(tensor);
  }
  void add(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return;
    if (all_.size() >= prune_at_) prune();
    One one{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), std::nullopt, count_++};
    if (torch::autograd::get_current_graph_task_id() != -1)
      one.storage.emplace(ImplRef::reclaim_copy(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()));
    all_.push_back(std::move(one));
  }
  // Notes a tensor that refers to another, which is its attribute `inner`. If only autograd refers to the first, the same holds for
  // the second. inner: an interned string.
  void add_wrapper(const at::Tensor& tensor, PyObject* inner) {
    if (wrappers_.size() >= prune_wrappers_at_) prune_wrappers();
    wrappers_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), Ref::copy(inner)});
  }
  void forget() {
    all_.clear();
    wrappers_.clear();
  }
  int64_t count() const { return count_; }

  // Returns the versions of tensors noted since `from` (a number from `count`) to which Python code refers; and of all that were made
  // in a backward pass: while a gradient is on its way, only autograd's engine refers to it.
  VersionList held(int64_t from) {
    prune();
    auto wrapped = references_of_wrappers();
    auto is_held = [&](c10::TensorImpl* tensor) {
      Py_ssize_t references = references_in_python(tensor);
      if (references == 0 || wrapped.empty()) return references != 0;
      auto by_wrappers = wrapped.find(object_in(tensor->pyobj_slot()));
      return by_wrappers == wrapped.end() || references > by_wrappers->second;
    };
    VersionList found;
    std::unordered_set<const Version*> seen;
    for (const One& one : all_) {
      if (one.number < from) continue;
      const c10::StorageImpl* storage = nullptr;
      if (one.storage) {
        if (auto kept = one.storage->lock()) storage = kept.get();
      } else if (auto tensor = one.tensor.lock(); tensor && is_held(tensor.get())) {
        storage = tensor->unsafe_storage().unsafeGetStorageImpl();
      }
      Version* version = storage == nullptr ? nullptr : versions_.at(storage);
      if (version != nullptr && !version->constant() && seen.insert(version).second) found.push_back(version);
    }
    return found;
  }

 private:
  struct One {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;  // if made in a backward pass
    int64_t number;

    bool is_gone() const { return storage ? storage->expired() : tensor.expired(); }
  };

  void prune() {
    all_.erase(std::remove_if(all_.begin(), all_.end(), [](const One& one) { return one.is_gone(); }), all_.end());
    prune_at_ = 2 * all_.size() + FEW;
  }

  struct Wrapper {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    Ref inner;  // the name of its attribute
  };

  void prune_wrappers() {
    auto is_gone = [](const Wrapper& one) { return one.tensor.expired(); };
    wrappers_.erase(std::remove_if(wrappers_.begin(), wrappers_.end(), is_gone), wrappers_.end());
    prune_wrappers_at_ = 2 * wrappers_.size() + FEW;
  }
  // Returns how many references to Python's tensors belong to wrappers to which Python code does not refer itself.
  std::unordered_map<PyObject*, Py_ssize_t> references_of_wrappers() {
    prune_wrappers();
    std::unordered_map<PyObject*, Py_ssize_t> found;
    for (const Wrapper& one : wrappers_) {
      auto tensor = one.tensor.lock();
      if (!tensor || references_in_python(tensor.get()) != 0) continue;
      PyObject* object = object_in(tensor->pyobj_slot());
      if (object != nullptr) found[checked(PyObject_GetAttr(object, one.inner.get())).get()]++;
    }
    return found;
  }

  static constexpr size_t FEW = 256;

  const TensorVersions& versions_;
  std::vector<One> all_;
  std::vector<Wrapper> wrappers_;
  size_t prune_at_ = FEW, prune_wrappers_at_ = FEW;
  int64_t count_ = 0;  // of all that have ever been noted
};

}  // namespace dtrrun
