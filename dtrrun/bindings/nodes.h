// The nodes of the graph, versions of storages and the operations that made them, and how Python sees them.
//
// C++ owns nodes and counts their references. A node's Python object is embedded in it, and is asleep while Python holds no
// reference to it: `as_object` wakes it, and keeps the node until Python drops the last reference. So a node always has the
// same Python object, but most nodes never need one, and are made and freed without Python.
//
// Their other Python methods are those of `core.graph`, added in `bindings/__init__.py`. What only a session's nodes have is in
// `native/graph.h`.
//
// Their classes are made by hand, and not by pybind11 like all others: pybind11's objects have a C++ object elsewhere, which they own or
// share, and are made with it.
//
// References run from dependents to inputs only, so there are no cycles, and the garbage collector need not track nodes.
#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "../core/policy/evicted.h"
#include "../core/version.h"
#include "python.h"

namespace dtrrun {

// -- operations -----------------------------------------------------------------------------------------------

struct OperationObject {
  PyObject_HEAD  // asleep if it has no references
  Recorded operation;  // owns references to the versions that it reads, and to its signature
  struct Shown {
    PyObject *inputs, *tensors;  // as sequences
    PyObject* recorded;
  }* shown;  // what Python has asked for or assigned
  size_t nbytes;  // including what follows this struct in memory
  bool is_fixed;  // its `reads` are stored behind this struct and can't be changed
  bool has_recipe;  // in a session: a `Recipe` is stored right behind this struct
};

inline PyTypeObject* operation_type = nullptr;
inline PyObject* nothing = nullptr;  // an empty tuple

inline OperationObject* as_operation(PyObject* object) { return reinterpret_cast<OperationObject*>(object); }
// Returns the struct that contains an operation.
inline OperationObject* enclosing(const Operation* operation) {
  return reinterpret_cast<OperationObject*>(reinterpret_cast<char*>(const_cast<Operation*>(operation)) -
                                            offsetof(OperationObject, operation));
}

inline OperationObject::Shown& shown_of(OperationObject* one) {
  if (one->shown == nullptr) one->shown = new OperationObject::Shown{};
  return *one->shown;
}
inline Recorded* recorded_in(PyObject* operation) { return &as_operation(operation)->operation; }

// Hooks for recipes, which only a session's operations have.
struct Arguments {
  void (*destroy)(OperationObject*) = nullptr;
  PyObject* (*show)(OperationObject*) = nullptr;  // returns the operator that runs again
};
inline Arguments arguments_of_calls;

// Returns the Python object that contains `part`, after waking it if it is asleep.
template <class Part>
Ref wake(PyObject* object, PyTypeObject* type, Part* part) {
  if (Py_REFCNT(object) != 0) return Ref::copy(object);
  keep(part);
  return Ref(PyObject_Init(object, type));
}
// Returns None for null, like the other overloads.
inline Ref as_object(const Operation* operation) {
  if (operation == nullptr) return Ref::copy(Py_None);
  OperationObject* one = enclosing(operation);
  return wake(reinterpret_cast<PyObject*>(one), operation_type, static_cast<Operation*>(&one->operation));
}

// -- versions -------------------------------------------------------------------------------------------------

struct VersionObject {
  PyObject_HEAD  // asleep if it has no references
  Version node;
  PyObject* watch;  // a weak reference to the object that it is a version of, which reports that object's death
  PyObject *fingerprint, *uses;
};

inline PyTypeObject* version_type = nullptr;
inline int64_t living_versions = 0, living_operations = 0;

inline VersionObject* as_version(PyObject* object) { return reinterpret_cast<VersionObject*>(object); }
inline Version* node_of(PyObject* version) { return &as_version(version)->node; }
inline VersionObject* enclosing(const Node* node) {
  return reinterpret_cast<VersionObject*>(reinterpret_cast<char*>(const_cast<Node*>(node)) - offsetof(VersionObject, node));
}
inline Ref as_object(const Node* node) {
  if (node == nullptr) return Ref::copy(Py_None);
  VersionObject* one = enclosing(node);
  return wake(reinterpret_cast<PyObject*>(one), version_type, static_cast<Node*>(&one->node));
}

// Throws if `object` is not a version.
inline Version* native_node(PyObject* object) {
  if (Py_TYPE(object) == version_type) return node_of(object);
  PyErr_SetString(PyExc_TypeError, "a version is wanted");
  raise();
}

// -- storages -------------------------------------------------------------------------------------------------

// Set by each extension.
inline PyObject* (*storage_object)(Storage*) = nullptr;  // the Python object of a storage: owned
inline Storage* (*storage_in)(PyObject*) = nullptr;  // the storage of such an object: borrowed

inline Ref as_object(const StorageRef& storage) { return storage ? checked(storage_object(storage.get())) : Ref::copy(Py_None); }
// Returns no storage for None.
inline StorageRef as_storage(PyObject* object) {
  return object == nullptr || object == Py_None ? StorageRef() : StorageRef::copy(storage_in(object));
}
inline Ref as_tuple(const std::vector<StorageRef>& all) {
  Ref tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(all.size())));
  for (size_t i = 0; i < all.size(); i++) PyTuple_SET_ITEM(tuple.get(), i, as_object(all[i]).release());
  return tuple;
}

// -- pins ----------------------------------------------------------------------------------------------------

inline Ref as_object(Pin pin) {
  return pin == nullptr ? Ref::copy(Py_None)
                        : checked(PyUnicode_FromStringAndSize(pin->data(), static_cast<Py_ssize_t>(pin->size())));
}
inline Pin as_pin(PyObject* text) {
  if (text == nullptr || text == Py_None) return nullptr;
  Py_ssize_t size;
  const char* first = PyUnicode_AsUTF8AndSize(text, &size);
  if (first == nullptr) raise();
  return as_pin(std::string_view(first, static_cast<size_t>(size)));
}

// -- signatures -----------------------------------------------------------------------------------------------

struct SignatureObject {
  PyObject_HEAD
  Signature figures;
  PyObject *geometries, *operator_, *replayed_as;
};

inline PyTypeObject* signature_type = nullptr;  // the base class of the one in Python, which adds everything else

inline SignatureObject* as_signature(PyObject* object) { return reinterpret_cast<SignatureObject*>(object); }
inline SignatureObject* enclosing(const Signature* signature) {
  return reinterpret_cast<SignatureObject*>(reinterpret_cast<char*>(const_cast<Signature*>(signature)) -
                                            offsetof(SignatureObject, figures));
}
inline PyObject* operator_of(const Signature* signature) {
  PyObject* found = enclosing(signature)->operator_;
  return found == nullptr ? Py_None : found;
}
inline PyObject* operator_of(const Recorded* operation) { return operator_of(operation->signature); }

// Returns the signature of replays that omit some of the tensors: borrowed, or null if there is none.
inline PyObject* replayed_as(PyObject* signature) {
  PyObject* found = as_signature(signature)->replayed_as;
  return found == Py_None ? nullptr : found;
}

// Gives an operation its signature.
inline void set_signature(OperationObject* one, PyObject* borrowed) {
  Py_INCREF(borrowed);
  Signature* before = std::exchange(one->operation.signature, &as_signature(borrowed)->figures);
  if (before != nullptr) Py_DECREF(enclosing(before));
}

// Returns whether the program holds the storage that a version has or had. Set by each extension.
inline bool (*program_has)(const VersionObject*) = nullptr;

// -- making and freeing nodes ---------------------------------------------------------------------------------

// Makes a version that is resident and has no recipe. Object: the struct that contains it, otherwise all zeros.
template <class Object>
VersionRef new_version() {
  living_versions++;
  return VersionRef(&(new (NodeMemory::take(sizeof(Object))) Object())->node);
}

// Frees a version, and releases everything that it refers to.
template <class Object>
void free_version(Object* one) {
  one->node.leave_weak_references();  // first, since what follows may run Python code
  Py_CLEAR(one->watch);
  one->node.forget_policy();
  for (PyObject** link : {&one->uses, &one->fingerprint}) Py_CLEAR(*link);
  set_operation(&one->node, nullptr);
  one->~Object();
  NodeMemory::give_back(one, sizeof(Object));
  living_versions--;
}

// Makes an empty operation, to be filled in like that of `Graph.new_operation`. more_bytes: for what the caller puts behind it.
inline OperationRef blank_operation(size_t more_bytes = 0) {
  size_t nbytes = sizeof(OperationObject) + more_bytes;
  auto* one = new (NodeMemory::take(nbytes)) OperationObject();
  one->nbytes = nbytes;
  living_operations++;
  return OperationRef(&one->operation);
}

// Adds a version to an operation's `reads`, which must have room for it.
inline void add_read(Recorded* operation, Version* version) {
  keep(version);
  version->readers++;
  operation->reads[operation->count++] = version;
}
inline void let_go_of(const Operation& reads) {
  for (Node* read : reads) {
    as_version(read)->readers--;
    let_go(read);
  }
}

inline void delete_operation(Operation* operation) {
  OperationObject* one = enclosing(operation);
  if (one->has_recipe) arguments_of_calls.destroy(one);
  Operation reads{std::exchange(one->operation.reads, nullptr), std::exchange(one->operation.count, 0)};
  let_go_of(reads);
  if (!one->is_fixed) delete[] reads.reads;
  if (auto* shown = std::exchange(one->shown, nullptr)) {
    for (PyObject* link : {shown->inputs, shown->tensors, shown->recorded}) Py_XDECREF(link);
    delete shown;
  }
  if (one->operation.signature != nullptr) Py_DECREF(enclosing(one->operation.signature));
  size_t nbytes = one->nbytes;
  one->~OperationObject();
  NodeMemory::give_back(one, nbytes);
  living_operations--;
}

// Called by Python when it has dropped the last reference to an object.
inline void version_falls_asleep(PyObject* self) {
  Py_DECREF(Py_TYPE(self));
  let_go(static_cast<Node*>(node_of(self)));
}
inline void operation_falls_asleep(PyObject* self) {
  Py_DECREF(Py_TYPE(self));
  let_go(static_cast<Operation*>(recorded_in(self)));
}

// -- for Python ------------------------------------------------------------------------------------------------

// Returns a capsule that refers to a version weakly.
inline Ref weak_capsule(Version* version) {
  auto one = std::make_unique<WeakVersion>(version);
  Ref capsule = checked(PyCapsule_New(
      one.get(), nullptr, [](PyObject* object) { delete static_cast<WeakVersion*>(PyCapsule_GetPointer(object, nullptr)); }));
  one.release();
  return capsule;
}
// Returns the version, or None once it has gone.
inline Ref referent_of(PyObject* capsule) {
  return as_object(static_cast<WeakVersion*>(PyCapsule_GetPointer(capsule, nullptr))->get());
}

inline PyObject* weak_reference(PyObject* self, PyObject*) {
  auto referent = [](PyObject* capsule, PyObject*) { return referent_of(capsule).release(); };
  static PyMethodDef look = {"weak", referent, METH_NOARGS, nullptr};
  return guarded([&] { return PyCFunction_New(&look, weak_capsule(node_of(self)).get()); });
}

// Implements `core.graph.Version(storage, on_death)` for an object watched by weak reference.
inline void watch_death(Version* version, PyObject* storage, PyObject* on_death) {
  version->key = reinterpret_cast<int64_t>(storage);
  static PyMethodDef tell = {"tell",
                             [](PyObject* both, PyObject*) -> PyObject* {
                               Ref dead = referent_of(PyTuple_GET_ITEM(both, 0));
                               if (dead.get() == Py_None) Py_RETURN_NONE;
                               return PyObject_CallOneArg(PyTuple_GET_ITEM(both, 1), dead.get());
                             },
                             METH_O, nullptr};
  Ref callback;
  if (on_death != Py_None) {
    Ref both = checked(PyTuple_Pack(2, weak_capsule(version).get(), on_death));
    callback = checked(PyCFunction_New(&tell, both.get()));
  }
  enclosing(version)->watch = checked(PyWeakref_NewRef(storage, callback.get())).release();
}

inline int set_maker(PyObject* self, PyObject* value, void*) {
  if (value == Py_None || value == nullptr) {
    set_operation(node_of(self), nullptr);
    return 0;
  }
  if (Py_TYPE(value) != operation_type) {
    PyErr_SetString(PyExc_TypeError, "a version has an Operation");
    return -1;
  }
  set_operation(node_of(self), &as_operation(value)->operation);
  return 0;
}

// Returns the versions whose recipes are known to need this one; None if none has been noted.
inline PyObject* dependents_of_version(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    if (!node_of(self)->needed_by) return Ref::copy(Py_None).release();
    Ref found = checked(PyList_New(0));
    node_of(self)->each_dependent([&](Version* one) {
      if (PyList_Append(found.get(), as_object(one).get()) < 0) raise();
    });
    return found.release();
  });
}

// The parts of the type that depend on the kind of storage.
struct VersionType {
  int size;
  newfunc make;  // Version(storage, on_death)
  ternaryfunc referent;  // as a weak reference: the storage, or None
};

inline PyTypeObject* make_version_type(const std::string& module, const VersionType& kind) {
  using V = VersionObject;
  constexpr Py_ssize_t NODE = offsetof(V, node);
  static PyMemberDef members[] = {
      {"key", T_LONGLONG, NODE + offsetof(Version, key), 0, nullptr},
      {"nbytes", T_LONGLONG, NODE + offsetof(Version, nbytes), 0, nullptr},
      {"cost", T_LONGLONG, NODE + offsetof(Version, cost), 0, nullptr},
      {"last_access", T_LONGLONG, NODE + offsetof(Version, last_access), 0, nullptr},
      {"age", T_LONGLONG, NODE + offsetof(Version, age), 0, nullptr},
      {"mutations", T_LONGLONG, NODE + offsetof(Version, mutations), 0, nullptr},
      {"extent", T_LONGLONG, NODE + offsetof(Version, extent), 0, nullptr},
      {"locks", T_LONGLONG, NODE + offsetof(Version, locks), 0, nullptr},
      {"device", T_UBYTE, NODE + offsetof(Version, device), 0, nullptr},
      {"readers", T_LONGLONG, NODE + offsetof(Version, readers), READONLY, nullptr},
      {"resident", T_BOOL, NODE + offsetof(Version, resident), 0, nullptr},
      {"released", T_BOOL, NODE + offsetof(Version, released), READONLY, nullptr},
      {"superseded", T_BOOL, NODE + offsetof(Version, superseded), 0, nullptr},
      {"used", T_BOOL, NODE + offsetof(Version, used), 0, nullptr},
      {"escaped", T_BOOL, NODE + offsetof(Version, escaped), 0, nullptr},
      {"away", T_BOOL, NODE + offsetof(Version, away), 0, nullptr},
      {"fixed", T_BOOL, NODE + offsetof(Version, fixed), 0, nullptr},
      {"period", T_LONGLONG, NODE + offsetof(Version, period), 0, nullptr},
      {"fingerprint", T_OBJECT, offsetof(V, fingerprint), 0, nullptr},
      {"uses", T_OBJECT, offsetof(V, uses), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef computed[] = {
      {"operation", [](PyObject* self, void*) { return as_object(node_of(self)->operation).release(); }, set_maker, nullptr,
       nullptr},
      {"pin", [](PyObject* self, void*) { return guarded([&] { return as_object(node_of(self)->pin).release(); }); },
       [](PyObject* self, PyObject* value, void*) {
         Ref done(guarded([&] {
           node_of(self)->pin = as_pin(value);
           return Ref::copy(Py_None).release();
         }));
         return done ? 0 : -1;
       },
       nullptr, nullptr},
      {"scratch", [](PyObject* self, void*) { return guarded([&] { return as_object(node_of(self)->scratch).release(); }); },
       [](PyObject* self, PyObject* value, void*) {
         node_of(self)->set_scratch(as_storage(value));
         return 0;
       },
       nullptr, nullptr},
      {"copy", [](PyObject* self, void*) { return guarded([&] { return as_object(node_of(self)->copy).release(); }); }, nullptr,
       nullptr, nullptr},
      {"has_left", [](PyObject* self, void*) { return PyBool_FromLong(node_of(self)->has_left()); }, nullptr, nullptr, nullptr},
      {"dependents", dependents_of_version, nullptr, nullptr, nullptr},
      {"pool_id",
       [](PyObject* self, void*) -> PyObject* {
         int64_t found = node_of(self)->pool_id;
         return found == 0 ? Ref::copy(Py_None).release() : PyLong_FromLongLong(found);
       },
       nullptr, nullptr, nullptr},
      {"has_storage", [](PyObject* self, void*) { return PyBool_FromLong(program_has(as_version(self))); }, nullptr, nullptr,
       nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyMethodDef methods[] = {
      {"weak", weak_reference, METH_NOARGS, "A function that returns the version, or None once it has gone."},
      {"forget_dependents",
       [](PyObject* self, PyObject*) -> PyObject* {
         node_of(self)->needed_by.reset();
         Py_RETURN_NONE;
       },
       METH_NOARGS, "Nothing depends on it any more."},
      {"forget_policy",
       [](PyObject* self, PyObject*) -> PyObject* {
         node_of(self)->forget_policy();
         Py_RETURN_NONE;
       },
       METH_NOARGS, "Another policy takes over: this is in no pool, and neither evicted nor released."},
      {nullptr, nullptr, 0, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(kind.make)},
      {Py_tp_call, reinterpret_cast<void*>(kind.referent)},
      {Py_tp_dealloc, reinterpret_cast<void*>(version_falls_asleep)},
      {Py_tp_members, members},
      {Py_tp_getset, computed},
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char*>("Version(storage, on_death): a `core.graph.Version`.")},
      {0, nullptr},
  };
  static std::string name = module + ".Version";
  PyType_Spec spec = {name.c_str(), kind.size, 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

inline PyObject* get_recorded(PyObject* self, void*) {
  OperationObject* one = as_operation(self);
  if (one->has_recipe) return arguments_of_calls.show(one);
  PyObject* recorded = one->shown == nullptr ? nullptr : one->shown->recorded;
  return Ref::copy(recorded == nullptr ? Py_None : recorded).release();
}

inline int set_recorded(PyObject* self, PyObject* value, void*) {
  OperationObject* one = as_operation(self);
  if (one->has_recipe) arguments_of_calls.destroy(one);
  one->has_recipe = false;
  Py_XINCREF(value);
  Py_XSETREF(shown_of(one).recorded, value);
  return 0;
}

inline PyObject* get_inputs(PyObject* self, void*) {
  OperationObject* one = as_operation(self);
  PyObject*& inputs = shown_of(one).inputs;
  if (inputs == nullptr) {
    const Operation& reads = one->operation;
    inputs = PyTuple_New(reads.count);
    if (inputs == nullptr) return nullptr;
    for (uint32_t i = 0; i < reads.count; i++) PyTuple_SET_ITEM(inputs, i, as_object(reads.reads[i]).release());
  }
  return Ref::copy(inputs).release();
}

inline PyObject* overwritten_stand_in = nullptr;  // makes a core.graph.Overwritten

// Represents what an operator overwrites by a stand-in, made on demand.
inline PyObject* get_tensors(PyObject* self, void* closure) {
  OperationObject* one = as_operation(self);
  if (one->shown != nullptr && one->shown->tensors != nullptr) return Ref::copy(one->shown->tensors).release();
  if (!one->operation.tensors) return get_inputs(self, closure);
  return guarded([&] {
    Ref list = checked(PyList_New(0));
    for (const TensorEntry& entry : *one->operation.tensors) {
      Ref made;
      if (entry.version != nullptr)
        made = as_object(entry.version);
      else if (entry.same >= 0)
        made = Ref::copy(PyList_GET_ITEM(list.get(), entry.same));
      else
        made = checked(PyObject_CallFunction(overwritten_stand_in, "LL", entry.nbytes, entry.size));
      if (PyList_Append(list.get(), made.get()) < 0) raise();
    }
    shown_of(one).tensors = Ref::copy(list.get()).release();
    return list.release();
  });
}

// Returns `value` as a list or a tuple. Null after an error, which it is if what the operation reads is fixed.
inline Ref new_sequence(PyObject* self, PyObject* value) {
  if (as_operation(self)->is_fixed) {
    PyErr_SetString(PyExc_AttributeError, "what a session has recorded is fixed");
    return Ref();
  }
  if (value == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "it cannot be deleted");
    return Ref();
  }
  return Ref(PySequence_Fast(value, "a list or a tuple is wanted"));
}

// Sets what an operation reads.
inline void set_reads(Recorded* operation, const std::vector<Version*>& versions) {
  Operation before{operation->reads, operation->count};
  operation->reads = versions.empty() ? nullptr : new Node*[versions.size()];
  operation->count = 0;
  for (Version* read : versions) add_read(operation, read);
  let_go_of(before);
  delete[] before.reads;
}

inline int set_inputs(PyObject* self, PyObject* value, void*) {
  Ref sequence = new_sequence(self, value);
  if (!sequence) return -1;
  Items items(sequence.get());
  for (PyObject* one : items) {
    if (Py_TYPE(one) == version_type) continue;
    PyErr_SetString(PyExc_TypeError, "an operation reads versions");
    return -1;
  }
  std::vector<Version*> reads;
  for (PyObject* one : items) reads.push_back(node_of(one));
  set_reads(recorded_in(self), reads);
  Py_XSETREF(shown_of(as_operation(self)).inputs, sequence.release());
  return 0;
}

// tensors: versions and `core.graph.Overwritten`s; one of the latter may occur several times.
inline void take_tensors(OperationObject* one, Ref tensors) {
  auto entries = std::make_unique<std::vector<TensorEntry>>();
  Items all(tensors.get());
  for (PyObject* entry : all) {
    if (Py_TYPE(entry) == version_type) {
      entries->push_back({node_of(entry)});
      continue;
    }
    auto place = static_cast<int64_t>(entries->size()), first = std::find(all.begin(), all.end(), entry) - all.begin();
    entries->push_back({nullptr, attribute_number(entry, "nbytes"), attribute_number(entry, "size"), first < place ? first : -1});
  }
  one->operation.tensors = std::move(entries);
  Py_XSETREF(shown_of(one).tensors, tensors.release());
}

inline int set_tensors(PyObject* self, PyObject* value, void*) {
  Ref sequence = new_sequence(self, value);
  if (!sequence) return -1;
  Ref done(guarded([&] {
    take_tensors(as_operation(self), std::move(sequence));
    return Ref::copy(Py_None).release();
  }));
  return done ? 0 : -1;
}

// Returns where its output is, if there is exactly one; otherwise pairs of that and a version.
inline PyObject* get_outputs(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    const Recorded& one = *recorded_in(self);
    if (!one.outputs) return one.where == 0 ? Ref::copy(Py_None).release() : PyLong_FromLongLong(one.where);
    Ref list = checked(PyList_New(0));
    for (const Output& output : *one.outputs) {
      Version* version = output.version.get();
      if (version == nullptr) continue;
      Ref pair = checked(Py_BuildValue("(LO)", static_cast<long long>(output.where), as_object(version).get()));
      if (PyList_Append(list.get(), pair.get()) < 0) raise();
    }
    return PyList_AsTuple(list.get());
  });
}

// Returns where its outputs are, including those that are gone.
inline PyObject* get_places(PyObject* self, void*) {
  const Recorded& one = *recorded_in(self);
  if (!one.outputs) return Py_BuildValue("[L]", static_cast<long long>(one.where));
  return guarded([&] {
    Ref list = checked(PyList_New(0));
    for (const Output& output : *one.outputs)
      if (PyList_Append(list.get(), checked(PyLong_FromLongLong(output.where)).get()) < 0) raise();
    return list.release();
  });
}

inline int set_outputs(PyObject* self, PyObject* value, void*) {
  Ref done(guarded([&] {
    Ref sequence = checked(PySequence_Fast(value, "pairs of places and versions are wanted"));
    std::vector<Output> outputs;
    for (PyObject* pair : Items(sequence.get())) {
      PyObject *where, *version;
      if (!PyArg_ParseTuple(pair, "OO", &where, &version)) raise();
      outputs.push_back({as_number(where), WeakVersion(native_node(version))});
    }
    set_outputs(*recorded_in(self), std::move(outputs));
    return Ref::copy(Py_None).release();
  }));
  return done ? 0 : -1;
}

inline PyObject* versions_made(PyObject* self, PyObject* one) {
  return guarded([&] {
    Ref list = checked(PyList_New(0));
    recorded_in(self)->each_made(native_node(one), [&](int64_t where, Version* version) {
      Ref pair = checked(Py_BuildValue("(LO)", static_cast<long long>(where), as_object(version).get()));
      if (PyList_Append(list.get(), pair.get()) < 0) raise();
    });
    return list.release();
  });
}

template <std::vector<StorageRef> Recorded::Held::* member>
PyObject* get_storages(PyObject* self, void*) {
  const Recorded* one = recorded_in(self);
  return guarded([&] { return (one->held ? as_tuple(one->held.get()->*member) : Ref::copy(nothing)).release(); });
}

inline PyTypeObject* make_operation_type(const std::string& module) {
  using O = OperationObject;
  static PyMemberDef members[] = {
      {"secured", T_BOOL, offsetof(O, operation) + offsetof(Operation, secured), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef computed[] = {
      {"recorded", get_recorded, set_recorded, nullptr, nullptr},
      {"inputs", get_inputs, set_inputs, nullptr, nullptr},
      {"tensors", get_tensors, set_tensors, nullptr, nullptr},
      {"signature",
       [](PyObject* self, void*) {
         const Signature* found = recorded_in(self)->signature;
         return Ref::copy(found == nullptr ? Py_None : reinterpret_cast<PyObject*>(enclosing(found))).release();
       },
       [](PyObject* self, PyObject* value, void*) {
         if (value == nullptr || !PyObject_TypeCheck(value, signature_type)) {
           PyErr_SetString(PyExc_TypeError, "an operation has a Signature of its extension");
           return -1;
         }
         set_signature(as_operation(self), value);
         return 0;
       },
       nullptr, nullptr},
      {"outputs", get_outputs, set_outputs, nullptr, nullptr},
      {"places", get_places, nullptr, nullptr, nullptr},
      {"constants", get_storages<&Recorded::Held::constants>, nullptr, nullptr, nullptr},
      {"kept_inputs", get_storages<&Recorded::Held::kept_inputs>, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  auto make = [](PyTypeObject*, PyObject*, PyObject*) -> PyObject* {
    return guarded([] { return as_object(blank_operation().get()).release(); });
  };
  static PyMethodDef methods[] = {
      {"made", versions_made, METH_O, "made(one): pairs of where and each version that it makes, `one` among them."},
      {nullptr, nullptr, 0, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(+make)},
      {Py_tp_methods, methods},
      {Py_tp_dealloc, reinterpret_cast<void*>(operation_falls_asleep)},
      {Py_tp_members, members},
      {Py_tp_getset, computed},
      {Py_tp_doc, const_cast<char*>("A `core.graph.Operation`.")},
      {0, nullptr},
  };
  static std::string name = module + ".Operation";
  PyType_Spec spec = {name.c_str(), sizeof(O), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun
