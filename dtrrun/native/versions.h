// The present version of each storage, by the storage's address, in the order in which the storages came
// (`Ledger.versions`), and the queue of those that have died (`Ledger.dead`).
//
// A weak reference of Python's to each storage would tell its death, too, but takes a call into Python for each operator,
// and a Python object for each storage, which PyTorch could not let go of without the GIL.
#pragma once

#include <torch/csrc/Storage.h>

#include <algorithm>
#include <vector>

#include "graph.h"
#include "pytorch.h"

namespace dtrrun {

class Versions;
// Of all sessions whose versions are still looked at. Never destroyed: Python may live longer.
inline std::vector<Versions*>& tables = *new std::vector<Versions*>;

void settle_deaths();

// What has died, until `Ledger.collect_dead` accounts for it: versions, and other objects of Python's.
class Queue {
 public:
  void append(PyObject* one) {
    settle_deaths();
    died(one);
  }
  void prepend(PyObject* one) { waiting_.insert(waiting_.begin() + first_, Ref::copy(one)); }
  bool empty() const {
    settle_deaths();
    return is_empty();
  }
  size_t size() const {
    settle_deaths();
    return waiting_.size() - first_;
  }
  PyObject* front() const { return waiting_[first_].get(); }
  Ref pop() {
    Ref one = std::move(waiting_[first_++]);
    if (is_empty()) {
      waiting_.clear();
      first_ = 0;
    }
    return one;
  }
  // Appends one whose storage's turn it is.
  void died(PyObject* one) { waiting_.push_back(Ref::copy(one)); }

 private:
  bool is_empty() const { return first_ == waiting_.size(); }

  std::vector<Ref> waiting_;
  size_t first_ = 0;  // those before have been taken out
};

struct QueueObject {
  PyObject_HEAD
  Queue queue;
};

inline PyTypeObject* queue_type = nullptr;

inline Queue& queue_of(PyObject* self) { return reinterpret_cast<QueueObject*>(self)->queue; }

class Versions {
 public:
  // dead: a `QueueObject`, which receives the versions whose storages die.
  explicit Versions(PyObject* dead) : dead_(Ref::copy(dead)) {
    tables.push_back(this);
    deaths.listen(true);
  }
  ~Versions() {
    clear();
    tables.erase(std::find(tables.begin(), tables.end(), this));
    deaths.listen(false);
  }
  Versions(const Versions&) = delete;

  // Borrowed, or null.
  StoredVersion* find(int64_t key) const {
    if (cells_.empty()) return nullptr;
    for (size_t place = home(key);; place = (place + 1) & mask_) {
      const Cell& cell = cells_[place];
      if (cell.version == nullptr || cell.key == key) return cell.version;
    }
  }
  StoredVersion* find(const c10::StorageImpl* storage) const { return find(reinterpret_cast<int64_t>(storage)); }

  // Enters a version, or puts it in the place of the one that its storage had.
  void put(StoredVersion* made) {
    Py_INCREF(made);
    if (StoredVersion* old = find(made->node.key)) {
      if (old == made) {
        Py_DECREF(made);
        return;
      }
      made->before = old->before;
      made->after = old->after;
      (made->before == nullptr ? first_ : made->before->after) = made;
      (made->after == nullptr ? last_ : made->after->before) = made;
      cells_[place_of(made->node.key)].version = made;
      changes_++;  // an iterator may be at the old one
      let_go(old);
      return;
    }
    if (4 * (count_ + 1) > 3 * cells_.size()) grow();
    size_t place = home(made->node.key);
    while (cells_[place].version != nullptr) place = (place + 1) & mask_;
    cells_[place] = {made->node.key, made};
    made->before = last_;
    made->after = nullptr;
    (last_ == nullptr ? first_ : last_->after) = made;
    last_ = made;
    count_++;
    changes_++;
  }

  // Returns whether there was one.
  bool remove(int64_t key) {
    StoredVersion* one = find(key);
    if (one == nullptr) return false;
    size_t hole = place_of(key);
    for (size_t next = (hole + 1) & mask_; cells_[next].version != nullptr; next = (next + 1) & mask_) {
      if (((next - home(cells_[next].key)) & mask_) < ((next - hole) & mask_)) continue;
      cells_[hole] = cells_[next];
      hole = next;
    }
    cells_[hole] = {};
    (one->before == nullptr ? first_ : one->before->after) = one->after;
    (one->after == nullptr ? last_ : one->after->before) = one->before;
    count_--;
    changes_++;
    let_go(one);
    return true;
  }

  void clear() {
    while (first_ != nullptr) remove(first_->node.key);
  }

  // A storage with this address has died; perhaps another one is there already.
  void died(const c10::StorageImpl* storage) {
    StoredVersion* one = find(storage);
    if (one == nullptr || one->died || is_alive(one->storage)) return;
    one->died = true;
    queue_of(dead_.get()).died(reinterpret_cast<PyObject*>(one));
  }

  size_t size() const { return count_; }
  uint64_t changes() const { return changes_; }
  StoredVersion* first() const { return first_; }
  StoredVersion* last() const { return last_; }

 private:
  struct Cell {
    int64_t key = 0;
    StoredVersion* version = nullptr;  // owned
  };

  static void let_go(StoredVersion* one) {
    dtrrun::let_go(std::exchange(one->storage, nullptr));
    one->before = one->after = nullptr;
    Py_DECREF(one);
  }
  size_t home(int64_t key) const {  // addresses are 16 bytes apart
    return static_cast<size_t>((static_cast<uint64_t>(key) >> 4) * 0x9E3779B97F4A7C15ull >> 20) & mask_;
  }
  size_t place_of(int64_t key) const {
    size_t place = home(key);
    while (cells_[place].key != key || cells_[place].version == nullptr) place = (place + 1) & mask_;
    return place;
  }
  void grow() {
    std::vector<Cell> before(std::max<size_t>(64, 2 * cells_.size()));
    std::swap(before, cells_);
    mask_ = cells_.size() - 1;
    for (const Cell& cell : before) {
      if (cell.version == nullptr) continue;
      size_t place = home(cell.key);
      while (cells_[place].version != nullptr) place = (place + 1) & mask_;
      cells_[place] = cell;
    }
  }

  Ref dead_;
  std::vector<Cell> cells_;
  size_t mask_ = 0, count_ = 0;
  uint64_t changes_ = 0;
  StoredVersion *first_ = nullptr, *last_ = nullptr;
};

// Tells the sessions which of their storages have died. The caller has the GIL.
inline void settle_deaths() {
  if (!deaths.any()) return;
  deaths.each([](const c10::StorageImpl* storage) {
    for (Versions* table : tables) table->died(storage);
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
  if (!is_storage(storage)) return reinterpret_cast<int64_t>(storage);  // a stand-in
  return reinterpret_cast<int64_t>(THPStorage_Unpack(storage).unsafeGetStorageImpl());
}

// As `core.graph.Version(storage, on_death)`. The table tells the death of PyTorch's storages; stand-ins are watched.
inline PyObject* make_version(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *storage, *on_death;
  if (!PyArg_ParseTuple(args, "OO", &storage, &on_death)) return nullptr;
  return guarded([&]() -> PyObject* {
    Ref made = blank_version();
    if (is_storage(storage)) {
      c10::StorageImpl* impl = THPStorage_Unpack(storage).unsafeGetStorageImpl();
      if (WatchedStorage::can_watch(impl)) {
        take_storage(as_stored(made.get()), impl);
        return made.release();
      }
    }
    watch_death(made.get(), storage, on_death);
    node_of(made.get())->key = key_of(storage);
    return made.release();
  });
}

inline bool has_storage(const StoredVersion* one) {
  return one->watch == nullptr ? is_alive(one->storage) : PyWeakref_GetObject(one->watch) != Py_None;
}

// As a weak reference: the storage, or None.
inline PyObject* call_version(PyObject* self, PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    const StoredVersion* one = as_stored(self);
    if (one->watch != nullptr) {
      Ref found = Ref::copy(PyWeakref_GetObject(one->watch));
      if (is_storage(found.get())) checked(PyObject_CallMethod(found.get(), "_fix_weakref", nullptr));  // before 2.10
      return found.release();
    }
    StorageRef storage = held(one->storage);
    return storage ? object_of(c10::Storage(std::move(storage))).release() : Ref::copy(Py_None).release();
  });
}

inline PyTypeObject* make_queue_type() {
  auto make = [](PyTypeObject* type, PyObject*, PyObject*) -> PyObject* {
    PyObject* self = type->tp_alloc(type, 0);
    if (self != nullptr) new (&queue_of(self)) Queue();
    return self;
  };
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    queue_of(self).~Queue();
    type->tp_free(self);
    Py_DECREF(type);
  };
  auto length = [](PyObject* self) { return static_cast<Py_ssize_t>(queue_of(self).size()); };
  auto item = [](PyObject* self, Py_ssize_t place) -> PyObject* {
    if (place == 0 && !queue_of(self).empty()) return Ref::copy(queue_of(self).front()).release();
    PyErr_SetString(PyExc_IndexError, "only the first one is shown");
    return nullptr;
  };
  static PyMethodDef methods[] = {
      {"append", [](PyObject* self, PyObject* one) -> PyObject* {
         queue_of(self).append(one);
         Py_RETURN_NONE;
       }, METH_O, nullptr},
      {"appendleft", [](PyObject* self, PyObject* one) -> PyObject* {
         queue_of(self).prepend(one);
         Py_RETURN_NONE;
       }, METH_O, nullptr},
      {"popleft", [](PyObject* self, PyObject*) -> PyObject* {
         if (!queue_of(self).empty()) return queue_of(self).pop().release();
         PyErr_SetString(PyExc_IndexError, "it is empty");
         return nullptr;
       }, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(+make)},     {Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
      {Py_sq_length, reinterpret_cast<void*>(+length)}, {Py_sq_item, reinterpret_cast<void*>(+item)},
      {Py_tp_methods, methods},                         {Py_tp_doc, const_cast<char*>("As the deque of `Ledger.dead`.")},
      {0, nullptr},
  };
  PyType_Spec spec = {"_dtrrun_native.Queue", sizeof(QueueObject), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

struct VersionsObject {
  PyObject_HEAD
  Versions* versions;
};

inline PyTypeObject* versions_type = nullptr;

inline Versions& versions_of(PyObject* self) { return *reinterpret_cast<VersionsObject*>(self)->versions; }

// For `bindings/walks.h`.
inline VersionList versions_of_table(PyObject* table) {
  if (Py_TYPE(table) != versions_type) {
    PyErr_SetString(PyExc_TypeError, "a table of versions is wanted");
    raise();
  }
  VersionList found;
  for (StoredVersion* one = versions_of(table).first(); one != nullptr; one = one->after) found.push_back(&one->node);
  return found;
}

// `values()` or `items()`, or an iterator over them.
struct ViewObject {
  PyObject_HEAD
  PyObject* table;
  StoredVersion* next;
  uint64_t changes;
  bool items, backward;
};

inline PyTypeObject *view_type = nullptr, *iterator_type = nullptr;

inline PyObject* make_view(PyTypeObject* type, PyObject* table, bool items, bool backward) {
  PyObject* made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  auto* view = reinterpret_cast<ViewObject*>(made);
  const Versions& versions = versions_of(table);
  view->table = Ref::copy(table).release();
  view->next = backward ? versions.last() : versions.first();
  view->changes = versions.changes();
  view->items = items;
  view->backward = backward;
  return made;
}

inline PyObject* next_version(PyObject* self) {
  auto* view = reinterpret_cast<ViewObject*>(self);
  if (view->changes != versions_of(view->table).changes()) {
    PyErr_SetString(PyExc_RuntimeError, "versions changed during iteration");
    return nullptr;
  }
  StoredVersion* one = view->next;
  if (one == nullptr) return nullptr;
  view->next = view->backward ? one->before : one->after;
  if (view->items) return Py_BuildValue("(LO)", static_cast<long long>(one->node.key), one);
  return Ref::copy(reinterpret_cast<PyObject*>(one)).release();
}

inline bool make_view_types() {
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_DECREF(reinterpret_cast<ViewObject*>(self)->table);
    type->tp_free(self);
    Py_DECREF(type);
  };
  static PyMethodDef methods[] = {
      {"__reversed__", [](PyObject* self, PyObject*) -> PyObject* {
         auto* view = reinterpret_cast<ViewObject*>(self);
         return make_view(iterator_type, view->table, view->items, true);
       }, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  auto iterate = [](PyObject* self) -> PyObject* {
    auto* view = reinterpret_cast<ViewObject*>(self);
    return make_view(iterator_type, view->table, view->items, false);
  };
  auto length = [](PyObject* self) {
    return static_cast<Py_ssize_t>(versions_of(reinterpret_cast<ViewObject*>(self)->table).size());
  };
  PyType_Slot of_view[] = {{Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
                           {Py_tp_iter, reinterpret_cast<void*>(+iterate)},
                           {Py_sq_length, reinterpret_cast<void*>(+length)},
                           {Py_tp_methods, methods},
                           {0, nullptr}};
  PyType_Slot of_iterator[] = {{Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
                               {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
                               {Py_tp_iternext, reinterpret_cast<void*>(next_version)},
                               {0, nullptr}};
  constexpr unsigned long flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  PyType_Spec view = {"_dtrrun_native.View", sizeof(ViewObject), 0, flags, of_view};
  PyType_Spec iterator = {"_dtrrun_native.Iterator", sizeof(ViewObject), 0, flags, of_iterator};
  view_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&view));
  iterator_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&iterator));
  return view_type != nullptr && iterator_type != nullptr;
}

inline PyTypeObject* make_versions_type() {
  if (!make_view_types()) return nullptr;
  auto make = [](PyTypeObject* type, PyObject* args, PyObject*) -> PyObject* {
    PyObject* dead;
    if (!PyArg_ParseTuple(args, "O!", queue_type, &dead)) return nullptr;
    return guarded([&]() -> PyObject* {
      auto versions = std::make_unique<Versions>(dead);
      Ref self = checked(type->tp_alloc(type, 0));
      reinterpret_cast<VersionsObject*>(self.get())->versions = versions.release();
      return self.release();
    });
  };
  auto length = [](PyObject* self) { return static_cast<Py_ssize_t>(versions_of(self).size()); };
  auto contains = [](PyObject* self, PyObject* key) -> int { return versions_of(self).find(as_number(key)) != nullptr; };
  auto get = [](PyObject* self, PyObject* key) -> PyObject* {
    auto* found = reinterpret_cast<PyObject*>(versions_of(self).find(as_number(key)));
    if (found == nullptr) PyErr_SetObject(PyExc_KeyError, key);
    return Ref::copy(found).release();
  };
  auto set = [](PyObject* self, PyObject* key, PyObject* value) -> int {
    int64_t number = as_number(key);
    if (value == nullptr) {
      if (versions_of(self).remove(number)) return 0;
      PyErr_SetObject(PyExc_KeyError, key);
      return -1;
    }
    if (Py_TYPE(value) != version_type || as_stored(value)->node.key != number) {
      PyErr_SetString(PyExc_TypeError, "a native version, by its key, is wanted");
      return -1;
    }
    versions_of(self).put(as_stored(value));
    return 0;
  };
  static PyMethodDef methods[] = {
      {"get", [](PyObject* self, PyObject* key) -> PyObject* {
         auto* found = reinterpret_cast<PyObject*>(versions_of(self).find(as_number(key)));
         return Ref::copy(found == nullptr ? Py_None : found).release();
       }, METH_O, nullptr},
      {"values", [](PyObject* self, PyObject*) { return make_view(view_type, self, false, false); }, METH_NOARGS, nullptr},
      {"items", [](PyObject* self, PyObject*) { return make_view(view_type, self, true, false); }, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(+make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(deallocate_owner<VersionsObject, Versions, &VersionsObject::versions>)},
      {Py_tp_methods, methods},
      {Py_mp_length, reinterpret_cast<void*>(+length)},
      {Py_mp_subscript, reinterpret_cast<void*>(+get)},
      {Py_mp_ass_subscript, reinterpret_cast<void*>(+set)},
      {Py_sq_contains, reinterpret_cast<void*>(+contains)},
      {Py_tp_doc, const_cast<char*>("Versions(queue): a mapping, as the dict of `Ledger.versions`. The queue receives those whose storages die.")},
      {0, nullptr},
  };
  PyType_Spec spec = {"_dtrrun_native.Versions", sizeof(VersionsObject), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun
