// The versions of tensors' storages, for the fast path.
#pragma once

#include "observers.h"
#include "versions.h"

namespace dtrrun {

class TensorVersions {
 public:
  // mask: that rounds bytes as the session's allocator does.
  TensorVersions(PyObject* ledger, int64_t mask)
      : core(core_of(ledger)), ledger(core.ledger), observers(ledger), fingerprints(ledger), object_(Ref::copy(ledger)),
        mask_(mask) {}

  Core& core;
  Ledger& ledger;
  Observers observers;
  Fingerprints fingerprints;

  PyObject* ledger_object() const { return object_.get(); }
  int64_t rounded(int64_t nbytes) const { return (nbytes - 1 - mask_) & mask_; }

  // The version of a tensor's storage: a borrowed reference, or null.
  PyObject* of(const at::Tensor& tensor) const {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage()) return nullptr;
    return at(impl->unsafe_storage().unsafeGetStorageImpl());
  }
  // Null, too, if the storage cannot be watched: all that concerns it is for Python.
  PyObject* at(const c10::StorageImpl* storage) const {
    Version* found = ledger.versions.find(reinterpret_cast<int64_t>(storage));
    return found == nullptr || as_stored(found)->storage == nullptr ? nullptr : as_object(found);
  }

  // Whether the program has a version's storage (`Version.has_storage`), which can be watched.
  static bool has_storage(PyObject* one) { return is_alive(as_stored(one)->storage); }
  // That storage, or null.
  static ImplRef storage_of(PyObject* one) { return held(as_stored(one)->storage); }

  // Enters a new storage (`Operators::enter`), or memory that nothing has written to (`adopt`): maker is null. cost: of the
  // operator, ns.
  Ref enter(c10::StorageImpl* storage, PyObject* maker, int64_t cost, Pin pin) {
    Ref made = blank_version();
    take_storage(as_stored(made.get()), storage);
    Version* one = node_of(made.get());
    one->last_access = ledger.clock;
    one->age = ledger.age;
    one->nbytes = rounded(static_cast<int64_t>(storage->nbytes()));
    if (maker != nullptr) {
      one->cost = cost;
      set_operation(one, recorded_in(maker));
    } else {
      one->pin = pin;
    }
    ledger.enter(one);
    if (maker != nullptr) ledger.evictable(one);
    return made;
  }

  // `Recipes::supersede`. maker: null if the mutation has no recipe.
  Ref supersede(PyObject* target, PyObject* maker, int64_t cost) {
    VersionRef made = core.recipes.supersede(node_of(target), maker == nullptr ? nullptr : recorded_in(maker), cost);
    return Ref::copy(as_object(made.get()));
  }

  // Whether what is about to be written to has a copy, or may be worth one: that is for Python.
  bool may_be_copied(PyObject* object) {
    Version* one = node_of(object);
    if (one->copy) return true;
    if (!ledger.pressure || !one->used) return false;
    return !one->constant() || core.copies.wants(one);  // or it is about to become a constant
  }

 private:
  Ref object_;
  int64_t mask_;
};

}  // namespace dtrrun
