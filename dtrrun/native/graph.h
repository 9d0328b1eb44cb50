// The nodes of the graph, as `core.graph` describes them: versions of storages, and the operations that made them.
//
// They have the attributes of `core.graph.Version` and `Operation`, so that all of dtrrun/core works with them, but
// keep numbers as numbers. What they can do besides is Python's: `dispatch/native.py` gives them its methods.
//
// References run from dependents to inputs only, so there are no cycles, and the garbage collector need not know them.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attributes.h"
#include "recipe.h"
#include "storages.h"

namespace dtrrun {

// -- fields: what C++ reads and writes of an object, by name ------------------------------------------------

template <class Object, int64_t Object::*member>
struct Number {
  static int64_t number(PyObject* object) { return reinterpret_cast<Object*>(object)->*member; }
  static void set_number(PyObject* object, int64_t number) { reinterpret_cast<Object*>(object)->*member = number; }
  static void add(PyObject* object, int64_t more) { reinterpret_cast<Object*>(object)->*member += more; }
};

template <class Object, bool Object::*member>
struct Flag {
  static bool is_true(PyObject* object) { return reinterpret_cast<Object*>(object)->*member; }
  static void set(PyObject* object, bool value) { reinterpret_cast<Object*>(object)->*member = value; }
};

// A number, or 0 for None.
template <class Object, int64_t Object::*member>
struct Optional : Number<Object, member> {
  static bool is_none(PyObject* object) { return Optional::number(object) == 0; }
  static void clear(PyObject* object) { Optional::set_number(object, 0); }
};

// A reference to an object of Python; null is None.
template <class Object, PyObject* Object::*member>
struct Link {
  static PyObject* get(PyObject* object) {
    PyObject* found = reinterpret_cast<Object*>(object)->*member;
    return found == nullptr ? Py_None : found;
  }
  static bool is_none(PyObject* object) { return get(object) == Py_None; }
  static void set(PyObject* object, PyObject* borrowed) {
    Py_INCREF(borrowed);
    take(object, borrowed);
  }
  static void take(PyObject* object, PyObject* owned) {
    PyObject* before = std::exchange(reinterpret_cast<Object*>(object)->*member, owned);
    Py_XDECREF(before);
  }
  static void clear(PyObject* object) { take(object, nullptr); }
};

// -- versions -------------------------------------------------------------------------------------------------

struct VersionObject {
  PyObject_HEAD
  PyObject* weak_references;
  VersionObject *before, *after;  // in `Versions`
  c10::StorageImpl* storage;      // a weak reference; null once another version has it
  PyObject* watch;                // tells the death of what is not PyTorch's own kind of storage (`make_version`)
  int64_t key, nbytes, cost, last_access, age, mutations, extent, locks;
  int64_t bound;  // 0: None
  bool resident, superseded, used, escaped;
  bool died;  // its storage, which its session knows
  PyObject *operation, *pin, *scratch, *copy, *block, *needed_by, *fingerprint, *uses, *component, *dependents, *neighbourhood;
};

struct VersionFields {
  using V = VersionObject;
  Number<V, &V::key> key;
  Number<V, &V::nbytes> nbytes;
  Number<V, &V::cost> cost;
  Number<V, &V::last_access> last_access;
  Number<V, &V::age> age;
  Number<V, &V::mutations> mutations;
  Number<V, &V::extent> extent;
  Number<V, &V::locks> locks;
  Optional<V, &V::bound> bound;
  Flag<V, &V::resident> resident;
  Flag<V, &V::superseded> superseded;
  Flag<V, &V::used> used;
  Flag<V, &V::escaped> escaped;
  using Operation = Link<V, &V::operation>;
  Operation operation;
  Link<V, &V::pin> pin;
  Link<V, &V::scratch> scratch;
  Link<V, &V::copy> copy;
  Link<V, &V::block> block;
  Link<V, &V::needed_by> needed_by;
  Link<V, &V::fingerprint> fingerprint;
  Link<V, &V::uses> uses;
  Link<V, &V::component> component;
  Link<V, &V::dependents> dependents;
  Link<V, &V::neighbourhood> neighbourhood;
};

inline PyTypeObject* version_type = nullptr;
inline int64_t living_versions = 0, living_operations = 0;

inline VersionObject* as_version(PyObject* object) { return reinterpret_cast<VersionObject*>(object); }

// A node that is all zeros. more_bytes: for what the caller puts behind it.
template <class Node>
Ref allocate(PyTypeObject* type, size_t more_bytes = 0) {
  void* memory = PyObject_Malloc(sizeof(Node) + more_bytes);
  if (memory == nullptr) {
    PyErr_NoMemory();
    raise();
  }
  std::memset(memory, 0, sizeof(Node));
  return Ref(PyObject_Init(static_cast<PyObject*>(memory), type));
}

inline void deallocate(PyObject* node) {
  PyTypeObject* type = Py_TYPE(node);
  PyObject_Free(node);
  Py_DECREF(type);
}

// A resident version without a recipe, whose storage is not known yet.
inline Ref blank_version() {
  Ref made = allocate<VersionObject>(version_type);
  as_version(made.get())->extent = -1;
  as_version(made.get())->resident = true;
  living_versions++;
  return made;
}

// Lets go of an operation. What only that has kept is freed as well, and what that has been computed from, and so on: of
// a long chain not all at once, which would need a long stack.
inline void let_go_of_operation(PyObject* operation) {
  constexpr int DEEPEST = 50;
  static std::vector<PyObject*>& waiting = *new std::vector<PyObject*>;
  static int depth = 0;
  if (depth == DEEPEST) {
    waiting.push_back(operation);
    return;
  }
  depth++;
  Py_DECREF(operation);
  depth--;
  while (depth == 0 && !waiting.empty()) {
    PyObject* next = waiting.back();
    waiting.pop_back();
    depth++;
    Py_DECREF(next);
    depth--;
  }
}

inline void delete_version(PyObject* self) {
  VersionObject* one = as_version(self);
  if (one->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  let_go(std::exchange(one->storage, nullptr));
  Py_CLEAR(one->watch);
  for (PyObject** link : {&one->component, &one->dependents, &one->neighbourhood, &one->uses, &one->needed_by,
                          &one->fingerprint, &one->block, &one->scratch, &one->copy, &one->pin})
    Py_CLEAR(*link);
  if (one->operation != nullptr) let_go_of_operation(std::exchange(one->operation, nullptr));
  living_versions--;
  deallocate(self);
}

inline PyObject* get_bound(PyObject* self, void*) {
  int64_t number = as_version(self)->bound;
  return number == 0 ? Ref::copy(Py_None).release() : PyLong_FromLongLong(number);
}

inline int set_bound(PyObject* self, PyObject* value, void*) {
  int64_t number = value == nullptr || value == Py_None ? 0 : as_number(value);
  if (number == -1 && PyErr_Occurred()) return -1;
  as_version(self)->bound = number;
  return 0;
}

inline PyTypeObject* operation_type = nullptr;

inline int set_operation(PyObject* self, PyObject* value, void*) {
  if (value == Py_None) value = nullptr;
  if (value != nullptr && Py_TYPE(value) != operation_type) {
    PyErr_SetString(PyExc_TypeError, "a native version has a native operation");
    return -1;
  }
  Py_XINCREF(value);
  Py_XSETREF(as_version(self)->operation, value);
  return 0;
}

// In versions.h.
bool has_storage(const VersionObject* one);
PyObject* make_version(PyTypeObject* type, PyObject* args, PyObject* named);
PyObject* call_version(PyObject* self, PyObject* args, PyObject* named);

inline PyTypeObject* make_version_type() {
  using V = VersionObject;
  static PyMemberDef members[] = {
      {"key", T_LONGLONG, offsetof(V, key), 0, nullptr},
      {"nbytes", T_LONGLONG, offsetof(V, nbytes), 0, nullptr},
      {"cost", T_LONGLONG, offsetof(V, cost), 0, nullptr},
      {"last_access", T_LONGLONG, offsetof(V, last_access), 0, nullptr},
      {"age", T_LONGLONG, offsetof(V, age), 0, nullptr},
      {"mutations", T_LONGLONG, offsetof(V, mutations), 0, nullptr},
      {"extent", T_LONGLONG, offsetof(V, extent), 0, nullptr},
      {"locks", T_LONGLONG, offsetof(V, locks), 0, nullptr},
      {"resident", T_BOOL, offsetof(V, resident), 0, nullptr},
      {"superseded", T_BOOL, offsetof(V, superseded), 0, nullptr},
      {"used", T_BOOL, offsetof(V, used), 0, nullptr},
      {"escaped", T_BOOL, offsetof(V, escaped), 0, nullptr},
      {"pin", T_OBJECT, offsetof(V, pin), 0, nullptr},
      {"scratch", T_OBJECT, offsetof(V, scratch), 0, nullptr},
      {"copy", T_OBJECT, offsetof(V, copy), 0, nullptr},
      {"block", T_OBJECT, offsetof(V, block), 0, nullptr},
      {"needed_by", T_OBJECT, offsetof(V, needed_by), 0, nullptr},
      {"fingerprint", T_OBJECT, offsetof(V, fingerprint), 0, nullptr},
      {"uses", T_OBJECT, offsetof(V, uses), 0, nullptr},
      {"component", T_OBJECT, offsetof(V, component), 0, nullptr},
      {"dependents", T_OBJECT, offsetof(V, dependents), 0, nullptr},
      {"neighbourhood", T_OBJECT, offsetof(V, neighbourhood), 0, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(V, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef computed[] = {
      {"bound", get_bound, set_bound, nullptr, nullptr},
      {"has_storage", [](PyObject* self, void*) { return PyBool_FromLong(has_storage(as_version(self))); }, nullptr,
       nullptr, nullptr},
      {"operation", [](PyObject* self, void*) { return Ref::copy(VersionFields::Operation::get(self)).release(); },
       set_operation, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make_version)},
      {Py_tp_call, reinterpret_cast<void*>(call_version)},
      {Py_tp_dealloc, reinterpret_cast<void*>(delete_version)},
      {Py_tp_members, members},
      {Py_tp_getset, computed},
      {Py_tp_doc, const_cast<char*>("Version(storage, on_death): a `core.graph.Version`.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"_dtrrun_native.Version", sizeof(V), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// -- operations -----------------------------------------------------------------------------------------------

// What the fast path records has a recipe, which stands behind the object, as do the versions that it reads. What the
// slow path records has Python's objects instead.
struct OperationObject {
  PyObject_HEAD
  PyObject *signature, *outputs, *constants, *kept_inputs;
  PyObject* inputs;    // once Python has asked for it, or from Python
  PyObject* tensors;   // null: the same
  PyObject* recorded;  // from Python
  uint32_t count;      // of those behind it
  bool secured, has_recipe;

  PyObject** reads() { return reinterpret_cast<PyObject**>(this + 1); }
  Recipe* recipe() { return has_recipe ? reinterpret_cast<Recipe*>(reads() + count) : nullptr; }
};

struct OperationFields {
  using O = OperationObject;
  Link<O, &O::signature> signature;
  Link<O, &O::tensors> tensors;  // None: the inputs
  Link<O, &O::outputs> outputs;
  Link<O, &O::constants> constants;
  Link<O, &O::kept_inputs> kept_inputs;
  Flag<O, &O::secured> secured;

  // Calls function(where, version) for each version that it makes, `one` among them (`Operation.made`).
  template <class Function>
  static void each_made(PyObject* operation, PyObject* one, const Function& function) {
    PyObject* outputs = reinterpret_cast<O*>(operation)->outputs;
    if (outputs == nullptr || outputs == Py_None) return function(int64_t{0}, one);
    if (PyLong_Check(outputs)) return function(as_number(outputs), one);
    for (PyObject* pair : Items(outputs)) {
      PyObject* made = PyWeakref_GetObject(PyTuple_GET_ITEM(pair, 1));
      if (made != Py_None) function(as_number(PyTuple_GET_ITEM(pair, 0)), made);
    }
  }
  // Calls function(place) for each of its tensors that it writes to.
  template <class Function>
  static void each_written(PyObject* operation, const Function& function) {
    PyObject* outputs = reinterpret_cast<O*>(operation)->outputs;
    if (outputs == nullptr || outputs == Py_None) return;
    auto tell = [&](PyObject* where) {
      if (as_number(where) < 0) function(~as_number(where));
    };
    if (PyLong_Check(outputs)) return tell(outputs);
    for (PyObject* pair : Items(outputs)) tell(PyTuple_GET_ITEM(pair, 0));
  }

  // The versions that it reads.
  static Items inputs(PyObject* operation) {
    auto* one = reinterpret_cast<O*>(operation);
    if (one->count != 0) return Items(one->reads(), one->count);
    return one->inputs == nullptr ? Items() : Items(one->inputs);
  }
  // `Operation.references_to`.
  static Py_ssize_t references_to(PyObject* operation, PyObject* version) {
    auto* one = reinterpret_cast<O*>(operation);
    Py_ssize_t found = std::count(one->reads(), one->reads() + one->count, version);
    for (PyObject* sequence : {one->inputs, one->tensors == one->inputs ? nullptr : one->tensors}) {
      if (sequence == nullptr) continue;
      Items items(sequence);
      found += std::count(items.begin(), items.end(), version);
    }
    return found;
  }
  // Null if the slow path has recorded it.
  static const Recipe* recipe(PyObject* operation) { return reinterpret_cast<O*>(operation)->recipe(); }
};

inline PyObject* nothing = nullptr;  // an empty tuple

inline OperationObject* as_operation(PyObject* object) { return reinterpret_cast<OperationObject*>(object); }

// As `Graph.new_operation` makes it, without anything yet. more_bytes: as for `allocate`.
inline Ref blank_operation(size_t more_bytes = 0) {
  Ref made = allocate<OperationObject>(operation_type, more_bytes);
  as_operation(made.get())->kept_inputs = Ref::copy(nothing).release();
  living_operations++;
  return made;
}

inline void delete_operation(PyObject* self) {
  OperationObject* one = as_operation(self);
  if (one->has_recipe) one->recipe()->~Recipe();
  for (uint32_t i = 0; i < one->count; i++) Py_DECREF(one->reads()[i]);
  for (PyObject** link : {&one->recorded, &one->outputs, &one->constants, &one->kept_inputs, &one->inputs, &one->tensors,
                          &one->signature})
    Py_CLEAR(*link);
  living_operations--;
  deallocate(self);
}

inline PyObject* get_recorded(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    if (const Recipe* recipe = OperationFields::recipe(self)) return as_sequence(*recipe).release();
    PyObject* recorded = as_operation(self)->recorded;
    return Ref::copy(recorded == nullptr ? Py_None : recorded).release();
  });
}

inline int set_recorded(PyObject* self, PyObject* value, void*) {
  if (Recipe* recipe = as_operation(self)->recipe()) {
    as_operation(self)->has_recipe = false;
    recipe->~Recipe();
  }
  Py_XINCREF(value);
  Py_XSETREF(as_operation(self)->recorded, value);
  return 0;
}

inline PyObject* get_inputs(PyObject* self, void*) {
  OperationObject* one = as_operation(self);
  if (one->inputs == nullptr) {
    one->inputs = PyTuple_New(one->count);
    if (one->inputs == nullptr) return nullptr;
    for (uint32_t i = 0; i < one->count; i++) PyTuple_SET_ITEM(one->inputs, i, Ref::copy(one->reads()[i]).release());
  }
  return Ref::copy(one->inputs).release();
}

inline PyObject* get_tensors(PyObject* self, void* nothing) {
  PyObject* tensors = as_operation(self)->tensors;
  return tensors == nullptr ? get_inputs(self, nothing) : Ref::copy(tensors).release();
}

template <PyObject* OperationObject::*member>
int set_sequence(PyObject* self, PyObject* value, void*) {
  if (as_operation(self)->count != 0) {
    PyErr_SetString(PyExc_AttributeError, "what the fast path has recorded is fixed");
    return -1;
  }
  Ref sequence(value == nullptr ? nullptr : PySequence_Fast(value, "a list or a tuple is wanted"));
  if (!sequence) return -1;
  Py_XSETREF(as_operation(self)->*member, sequence.release());
  return 0;
}

inline PyTypeObject* make_operation_type() {
  using O = OperationObject;
  static PyMemberDef members[] = {
      {"signature", T_OBJECT, offsetof(O, signature), 0, nullptr},
      {"outputs", T_OBJECT, offsetof(O, outputs), 0, nullptr},
      {"constants", T_OBJECT, offsetof(O, constants), 0, nullptr},
      {"kept_inputs", T_OBJECT, offsetof(O, kept_inputs), 0, nullptr},
      {"secured", T_BOOL, offsetof(O, secured), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef computed[] = {
      {"recorded", get_recorded, set_recorded, nullptr, nullptr},
      {"inputs", get_inputs, set_sequence<&O::inputs>, nullptr, nullptr},
      {"tensors", get_tensors, set_sequence<&O::tensors>, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  auto make = [](PyTypeObject*, PyObject*, PyObject*) -> PyObject* {
    return guarded([] { return blank_operation().release(); });
  };
  static PyMethodDef methods[] = {
      {"references_to", [](PyObject* self, PyObject* version) {
         return PyLong_FromSsize_t(OperationFields::references_to(self, version));
       }, METH_O, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(+make)},
      {Py_tp_methods, methods},
      {Py_tp_dealloc, reinterpret_cast<void*>(delete_operation)},
      {Py_tp_members, members},
      {Py_tp_getset, computed},
      {Py_tp_doc, const_cast<char*>("A `core.graph.Operation`.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"_dtrrun_native.Operation", sizeof(O), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun
