// The storages of a session's versions: how the session is notified of their deaths, and how Python sees them.
//
// A Python weak reference to each storage would report its death too, but needs a call into Python for each operator and a
// Python object for each storage, which PyTorch could not release without the GIL.
#pragma once

#include <algorithm>
#include <vector>

#include "../bindings/ledger.h"
#include "graph.h"
#include "python_objects.h"
#include "pytorch.h"

namespace dtrrun {

// The ledgers of all sessions that still track versions. Never destroyed: Python may live longer.
inline std::vector<Ledger*>& ledgers = *new std::vector<Ledger*>;

// A storage at this address has died; another one may already be there.
inline void storage_died(Ledger& ledger, const c10::StorageImpl* storage) {
  Version* one = ledger.versions.find(reinterpret_cast<int64_t>(storage));
  if (one == nullptr || as_stored(one)->died || is_alive(as_stored(one)->storage)) return;
  as_stored(one)->died = true;
  ledger.dead->add(one);
}

// Notifies a ledger of its storages' deaths while in scope. The caller has the GIL.
class Listening {
 public:
  explicit Listening(Ledger& ledger) : ledger_(ledger) {
    ledgers.push_back(&ledger);
    deaths.listen(true);
  }
  ~Listening() {
    ledgers.erase(std::find(ledgers.begin(), ledgers.end(), &ledger_));
    deaths.listen(false);
  }
  Listening(const Listening&) = delete;

 private:
  Ledger& ledger_;
};

inline void tell_deaths() {
  if (!deaths.any()) return;
  deaths.each([](const c10::StorageImpl* storage) {
    for (Ledger* ledger : ledgers) storage_died(*ledger, storage);
  });
}

// Returns a Python object for a storage: the program's, or one of ours that PyTorch does not know about. One that it knows
// about lives as long as the storage. Releasing such a storage takes the GIL, and two gradients are not summed in place if
// either has an object. A storage that cannot be watched needs one: the object's death reports the storage's.
inline Ref object_of(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  bool is_known = object_in(impl->pyobj_slot()) != nullptr;
  if (is_known || !OwnStorages::can_watch(impl)) return own_object_of(storage);
  return new_object_of(storage);
}

// Makes this the storage of a new version. It must be watchable.
inline void take_storage(StoredVersion* one, c10::StorageImpl* storage) {
  OwnStorages::watch(storage);
  one->node.key = reinterpret_cast<int64_t>(storage);
  one->storage = weak_reference(storage);
}

// -- for Python ------------------------------------------------------------------------------------------------

// Returns the key of this storage's versions.
inline int64_t key_of(PyObject* storage) {
  if (!is_storage(storage)) return reinterpret_cast<int64_t>(storage);  // not PyTorch's
  return reinterpret_cast<int64_t>(storage_of(storage).unsafeGetStorageImpl());
}

// Like `core.graph.Version(storage, on_death)`. PyTorch's storages notify the ledger of their deaths; others get a Python weak
// reference.
inline VersionRef version_over(PyObject* storage, PyObject* on_death) {
  VersionRef made = new_version<StoredVersion>();
  if (is_storage(storage)) {
    c10::StorageImpl* impl = storage_of(storage).unsafeGetStorageImpl();
    if (OwnStorages::can_watch(impl)) {
      take_storage(as_stored(made.get()), impl);
      return made;
    }
  }
  watch_death(made.get(), storage, on_death);
  made->key = key_of(storage);
  return made;
}
inline PyObject* make_version(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *storage, *on_death;
  if (!PyArg_ParseTuple(args, "OO", &storage, &on_death)) return nullptr;
  return guarded([&] { return as_object(version_over(storage, on_death).get()).release(); });
}

inline bool has_storage(const StoredVersion* one) {
  return one->watch == nullptr ? is_alive(one->storage) : PyWeakref_GetObject(one->watch) != Py_None;
}

// Like calling a weak reference: returns the storage, or None.
inline Ref referent(const StoredVersion* one) {
  if (one->watch == nullptr) {
    ImplRef storage = held(one->storage);
    return storage ? object_of(c10::Storage(std::move(storage))) : Ref::copy(Py_None);
  }
  Ref found = Ref::copy(PyWeakref_GetObject(one->watch));
  if (is_storage(found.get())) checked(PyObject_CallMethod(found.get(), "_fix_weakref", nullptr));  // before 2.10
  return found;
}
inline PyObject* call_version(PyObject* self, PyObject*, PyObject*) {
  return guarded([&] { return referent(as_stored(self)).release(); });
}

}  // namespace dtrrun
