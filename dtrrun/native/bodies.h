// Finds out what a kernel that is not PyTorch's own touches while it runs: a table, a buffer or a closed-over tensor that is
// not among its arguments, and tensors that it keeps for later.
//
// Such a kernel runs with our key on, so that operators that it calls arrive here. They are not recorded: a recipe calls the
// whole kernel. But the kernel can be called again only if it has read nothing of the session's besides its arguments, since
// that may change.
#pragma once

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "arrival.h"
#include "tensor_versions.h"

namespace dtrrun {

// A kernel that is running in this thread.
class Body {
 public:
  using Touch = std::function<void(Version*, bool)>;
  // touch(version, writes): brings a version back and keeps it until the kernel has ended. values: the operator's arguments.
  Body(Touch touch, const c10::IValue* values, size_t count) : touch_(std::move(touch)), outer_(std::exchange(innermost, this)) {
    for (size_t place = 0; place < count; place++)
      each_tensor(values[place], [&](const at::Tensor& tensor) { known_.insert(storage_of(tensor)); });
  }
  ~Body() { innermost = outer_; }
  Body(const Body&) = delete;

  static inline thread_local Body* innermost = nullptr;

  // The kernel is about to call an operator. Raises the budget error.
  void calls(Arrival& arrival, const TensorVersions& versions) {
    const auto& arguments = arrival.schema().arguments();
    bool is_new = arrival.schema().name() == "aten::lift_fresh";  // `torch.tensor`: it has just been made
    for (size_t place = 0; place < arguments.size(); place++) {
      bool writes = arguments[place].alias_info() != nullptr && arguments[place].alias_info()->isWrite();
      each_tensor(arrival.values()[place], [&](const at::Tensor& tensor) {
        const c10::StorageImpl* storage = storage_of(tensor);
        if (storage == nullptr || known_.count(storage) != 0 || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
        Version* found = versions.at(storage);
        if (found == nullptr) {
          // Unknown to the session: a module's own tensor from before, or what the kernel has made without an operator. The
          // latter will be gone when the kernel has ended.
          if (writes) reads_unseen_ = true;
          if (!is_new && !writes) unmet_.push_back(tensor.storage().getWeakStorageImpl());
          return;
        }
        reads_unseen_ = true;
        if (!writes && told_.count(storage) != 0) return;
        told_.insert(storage);
        touch_(found, writes);
      });
    }
  }
  // The operator has returned. What it has made belongs to the kernel.
  void made(const Arrival& arrival) {
    for (const at::Tensor& tensor : arrival.tensors()) {
      const c10::StorageImpl* storage = storage_of(tensor);
      if (told_.count(storage) == 0) known_.insert(storage);
    }
  }

  // Returns true if the kernel has read something that outlives it. results: what it has returned.
  bool reads_unseen(const Stack& results) const {
    std::unordered_set<const c10::StorageImpl*> returned;
    for (const c10::IValue& value : results)
      each_tensor(value, [&](const at::Tensor& tensor) { returned.insert(storage_of(tensor)); });
    return reads_unseen_ || std::any_of(unmet_.begin(), unmet_.end(), [&](const auto& one) {
             auto storage = one.lock();
             return storage && returned.count(storage.get()) == 0;
           });
  }

  template <class Function>
  static void each_tensor(const c10::IValue& value, const Function& function) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) function(value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& item : value.toListRef())
        if (item.isTensor() && item.toTensor().defined()) function(item.toTensor());
    }
  }
  static c10::StorageImpl* storage_of(const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
  }

 private:
  Touch touch_;
  Body* outer_;
  std::unordered_set<const c10::StorageImpl*> known_;  // of its arguments, and of what it has made
  std::unordered_set<const c10::StorageImpl*> told_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> unmet_;  // read, and unknown to the session
  bool reads_unseen_ = false;
};

// Finds which of an operator's tensors its kernel has kept: there are new references to them or to their storages.
class KeptTensors {
 public:
  // Before the kernel runs. values: its arguments.
  KeptTensors(const c10::IValue* values, size_t count) : given_(values, values + count) {
    for (size_t place = 0; place < count; place++)
      Body::each_tensor(values[place], [&](const at::Tensor& tensor) {
        tensors_.emplace(tensor.unsafeGetTensorImpl(), tensor.use_count());
        if (c10::StorageImpl* storage = Body::storage_of(tensor))
          storages_.emplace(storage, c10::raw::intrusive_ptr::use_count(storage));
      });
  }

  // After it has run. results: what it has returned, to which nothing else refers yet.
  std::vector<at::Tensor> kept(const Stack& results) const {
    // References that the results account for.
    std::unordered_map<const c10::TensorImpl*, size_t> returned;
    std::unordered_map<const c10::StorageImpl*, size_t> over;
    std::vector<at::Tensor> made;
    for (const IValue& value : results)
      Body::each_tensor(value, [&](const at::Tensor& tensor) {
        const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
        if (returned[impl]++ == 0 && tensors_.count(impl) == 0)
          if (const c10::StorageImpl* storage = Body::storage_of(tensor)) over[storage]++;
      });
    std::vector<at::Tensor> found;
    auto look = [&](const at::Tensor& tensor) {
      const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      auto before = [](const auto& counts, const auto* one) {
        auto known = counts.find(one);
        return known == counts.end() ? size_t{0} : known->second;
      };
      if (tensor.use_count() > before(tensors_, impl) + before(returned, impl)) return found.push_back(tensor);
      c10::StorageImpl* storage = Body::storage_of(tensor);
      if (storage == nullptr) return;
      if (c10::raw::intrusive_ptr::use_count(storage) > before(storages_, storage) + before(over, storage))
        found.push_back(tensor);
    };
    for (const IValue& value : given_) Body::each_tensor(value, look);
    for (const IValue& value : results) Body::each_tensor(value, look);
    return found;
  }

 private:
  Stack given_;
  std::unordered_map<const c10::TensorImpl*, size_t> tensors_;
  std::unordered_map<const c10::StorageImpl*, size_t> storages_;
};

}  // namespace dtrrun
