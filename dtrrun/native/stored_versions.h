// The storages of a session's versions: how their deaths are told, and how Python sees them.
//
// A weak reference of Python's to each storage would tell its death, too, but takes a call into Python for each operator,
// and a Python object for each storage, which PyTorch could not let go of without the GIL.
#pragma once

#include <torch/csrc/Storage.h>

#include <algorithm>
#include <vector>

#include "../bindings/ledger.h"
#include "graph.h"
#include "pytorch.h"

namespace dtrrun {

// Of all sessions whose versions are still looked at. Never destroyed: Python may live longer.
inline std::vector<Ledger*>& ledgers = *new std::vector<Ledger*>;

// A storage with this address has died; perhaps another one is there already.
inline void storage_died(Ledger& ledger, const c10::StorageImpl* storage) {
  Version* one = ledger.versions.find(reinterpret_cast<int64_t>(storage));
  if (one == nullptr || as_stored(one)->died || is_alive(as_stored(one)->storage)) return;
  as_stored(one)->died = true;
  ledger.dead->add(one);
}

// While a ledger is told which of its storages have died. The caller has the GIL.
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

// An object of Python's for a storage: the program's, or one of ours, of which PyTorch knows nothing. One that it knows
// lives as long as the storage. It takes the GIL to let go of such a storage, and two gradients are not summed in
// place if there is an object for either. A storage that cannot be watched has to have one: its death tells the storage's.
inline Ref object_of(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  bool is_known = object_in(impl->pyobj_slot()) != nullptr;
  if (is_known || !WatchedStorage::can_watch(impl)) return checked(THPStorage_Wrap(storage));
  auto* type = reinterpret_cast<PyTypeObject*>(THPStorageClass);
  Ref object = checked(type->tp_alloc(type, 0));
  fill_object(reinterpret_cast<THPStorage*>(object.get()), storage);
  return object;
}

// Makes this the storage of a new version. It can be watched.
inline void take_storage(StoredVersion* one, c10::StorageImpl* storage) {
  WatchedStorage::watch(storage);
  one->node.key = reinterpret_cast<int64_t>(storage);
  one->storage = weak_reference(storage);
}

// -- for Python ------------------------------------------------------------------------------------------------

inline bool is_storage(PyObject* object) { return PyObject_TypeCheck(object, &THPStorageType); }

// What versions of this storage have as their key.
inline int64_t key_of(PyObject* storage) {
  if (!is_storage(storage)) return reinterpret_cast<int64_t>(storage);  // not PyTorch's
  return reinterpret_cast<int64_t>(THPStorage_Unpack(storage).unsafeGetStorageImpl());
}

// As `core.graph.Version(storage, on_death)`. The ledger is told the death of PyTorch's storages; others are watched.
inline VersionRef version_over(PyObject* storage, PyObject* on_death) {
  VersionRef made = new_version<StoredVersion>();
  if (is_storage(storage)) {
    c10::StorageImpl* impl = THPStorage_Unpack(storage).unsafeGetStorageImpl();
    if (WatchedStorage::can_watch(impl)) {
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

// As a weak reference: the storage, or None.
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
