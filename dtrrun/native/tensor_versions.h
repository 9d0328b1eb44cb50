// The versions of tensors' storages.
#pragma once

#include "observers.h"
#include "stored_versions.h"

namespace dtrrun {

class TensorVersions {
 public:
  // mask: rounds bytes as the session's allocator does.
  TensorVersions(PyObject* ledger, int64_t mask)
      : core(core_of(ledger)), ledger(core.ledger), observers(ledger), fingerprints(ledger), object_(Ref::copy(ledger)),
        mask_(mask) {}

  Core& core;
  Ledger& ledger;
  Observers observers;
  Fingerprints fingerprints;

  PyObject* ledger_object() const { return object_.get(); }
  int64_t rounded(int64_t nbytes) const { return dtrrun::rounded(nbytes, mask_); }

  // Returns the version of a tensor's storage, or null. Also returns null for a storage that cannot be watched.
  Version* of(const at::Tensor& tensor) const {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage()) return nullptr;
    return at(impl->unsafe_storage().unsafeGetStorageImpl());
  }
  Version* at(const c10::StorageImpl* storage) const {
    Version* found = ledger.versions.find(reinterpret_cast<int64_t>(storage));
    return found == nullptr || as_stored(found)->storage == nullptr ? nullptr : found;
  }

  // Returns the version of any tensor's storage, or null.
  Version* find(const at::Tensor& tensor) const {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage()) return nullptr;
    return ledger.versions.find(reinterpret_cast<int64_t>(impl->unsafe_storage().unsafeGetStorageImpl()));
  }

  // Returns true if the program still has the version's storage (`Version.has_storage`), which must be watchable.
  static bool has_storage(const Version* one) { return is_alive(as_stored(one)->storage); }
  // Returns that storage, or null.
  static ImplRef storage_of(const Version* one) { return held(as_stored(one)->storage); }

 private:
  Ref object_;
  int64_t mask_;
};

}  // namespace dtrrun
