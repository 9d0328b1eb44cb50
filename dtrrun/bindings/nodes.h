// The nodes of the graph as objects of Python: versions of storages, and the operations that made them.
//
// They keep numbers as numbers. What they can do besides is in `core.graph`: `bindings/nodes.py` gives them its methods. What a
// session's nodes have in addition is in `native/graph.h`.
//
// References run from dependents to inputs only, so there are no cycles, and the garbage collector need not know them.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "../core/policy/evicted.h"
#include "../core/version.h"
#include "python.h"

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

// -- operations -----------------------------------------------------------------------------------------------

struct OperationObject {
  PyObject_HEAD
  Operation operation;  // what it reads: versions, to which it has references
  PyObject *signature, *outputs, *constants, *kept_inputs;
  PyObject* inputs;    // as a sequence, once Python has asked for it, or from Python
  PyObject* tensors;   // null: the same
  PyObject* recorded;  // from Python
  bool is_fixed;    // what it reads stands behind it, and stays
  bool has_recipe;  // a session's, which stands behind that
};

inline PyTypeObject* operation_type = nullptr;
inline PyObject* nothing = nullptr;  // an empty tuple

inline OperationObject* as_operation(PyObject* object) { return reinterpret_cast<OperationObject*>(object); }
inline PyObject* as_object(const Operation* operation) {
  return reinterpret_cast<PyObject*>(reinterpret_cast<char*>(const_cast<Operation*>(operation)) -
                                     offsetof(OperationObject, operation));
}

// What only a session's operations have.
struct Recipes {
  void (*destroy)(OperationObject*) = nullptr;
  PyObject* (*show)(OperationObject*) = nullptr;  // as Python's `Operation.recorded`
};
inline Recipes recipes;

// -- versions -------------------------------------------------------------------------------------------------

struct VersionObject {
  PyObject_HEAD
  PyObject* weak_references;
  Version node;
  PyObject* watch;  // a weak reference to what it is a version of, which tells its death
  PyObject *pin, *scratch, *copy, *block, *needed_by, *fingerprint, *uses;
};

inline PyTypeObject* version_type = nullptr;
inline int64_t living_versions = 0, living_operations = 0;

inline VersionObject* as_version(PyObject* object) { return reinterpret_cast<VersionObject*>(object); }
inline Version* node_of(PyObject* version) { return &as_version(version)->node; }
inline PyObject* as_object(const Node* node) {
  return reinterpret_cast<PyObject*>(reinterpret_cast<char*>(const_cast<Node*>(node)) - offsetof(VersionObject, node));
}

// Throws if it is not a version.
inline Version* native_node(PyObject* object) {
  if (Py_TYPE(object) == version_type) return node_of(object);
  PyErr_SetString(PyExc_TypeError, "a version is wanted");
  raise();
}

inline const Lifetime versions_lifetime{[](Node* node) { Py_INCREF(as_object(node)); },
                                        [](Node* node) { Py_DECREF(as_object(node)); }};

// The versions that an operation reads, as objects: borrowed.
class Reads {
 public:
  class Iterator {
   public:
    using iterator_category = std::random_access_iterator_tag;
    using value_type = PyObject*;
    using difference_type = ptrdiff_t;
    using pointer = PyObject**;
    using reference = PyObject*;
    explicit Iterator(Node** place) : place_(place) {}
    PyObject* operator*() const { return as_object(*place_); }
    Iterator& operator++() {
      ++place_;
      return *this;
    }
    bool operator==(const Iterator& other) const { return place_ == other.place_; }
    bool operator!=(const Iterator& other) const { return place_ != other.place_; }
    difference_type operator-(const Iterator& other) const { return place_ - other.place_; }

   private:
    Node** place_;
  };

  explicit Reads(const Operation& operation) : operation_(operation) {}
  Iterator begin() const { return Iterator(operation_.begin()); }
  Iterator end() const { return Iterator(operation_.end()); }
  PyObject* operator[](Py_ssize_t place) const { return as_object(operation_.reads[place]); }
  Py_ssize_t size() const { return operation_.count; }

 private:
  Operation operation_;
};

template <auto member>
struct NodeNumber {
  static int64_t number(PyObject* version) { return node_of(version)->*member; }
  static void set_number(PyObject* version, int64_t number) { node_of(version)->*member = number; }
  static void add(PyObject* version, int64_t more) { node_of(version)->*member += more; }
};

template <auto member>
struct NodeFlag {
  static bool is_true(PyObject* version) { return node_of(version)->*member; }
  static void set(PyObject* version, bool value) { node_of(version)->*member = value; }
};

struct VersionFields {
  using V = VersionObject;
  NodeNumber<&Version::key> key;
  NodeNumber<&Node::nbytes> nbytes;
  NodeNumber<&Node::cost> cost;
  NodeNumber<&Node::last_access> last_access;
  NodeNumber<&Node::age> age;
  NodeNumber<&Version::mutations> mutations;
  NodeNumber<&Version::extent> extent;
  NodeNumber<&Version::locks> locks;
  NodeFlag<&Version::superseded> superseded;
  NodeFlag<&Version::used> used;
  NodeFlag<&Version::escaped> escaped;
  NodeFlag<&Node::resident> resident;
  struct PoolId {
    static bool is_none(PyObject* version) { return node_of(version)->pool_id == 0; }
  } pool_id;
  // An `OperationObject`, or None.
  struct Maker {
    static PyObject* get(PyObject* version) {
      Operation* found = node_of(version)->operation;
      return found == nullptr ? Py_None : as_object(found);
    }
    static bool is_none(PyObject* version) { return node_of(version)->operation == nullptr; }
    static void set(PyObject* version, PyObject* borrowed) {
      Py_INCREF(borrowed);
      take(version, &as_operation(borrowed)->operation);
    }
    static void clear(PyObject* version) { take(version, nullptr); }

   private:
    static void take(PyObject* version, Operation* owned) {
      if (Operation* before = std::exchange(node_of(version)->operation, owned)) Py_DECREF(as_object(before));
    }
  } operation;
  // Memory of its own, which the program does not have.
  struct Scratch : Link<V, &V::scratch> {
    using Plain = Link<V, &V::scratch>;
    static void set(PyObject* version, PyObject* borrowed) {
      Plain::set(version, borrowed);
      node_of(version)->released = !Plain::is_none(version);
    }
    static void clear(PyObject* version) {
      node_of(version)->released = false;
      Plain::clear(version);
    }
  } scratch;
  Link<V, &V::pin> pin;
  Link<V, &V::copy> copy;
  Link<V, &V::block> block;
  Link<V, &V::needed_by> needed_by;
  Link<V, &V::fingerprint> fingerprint;
  Link<V, &V::uses> uses;
};

struct OperationFields {
  using O = OperationObject;
  Link<O, &O::signature> signature;
  Link<O, &O::tensors> tensors;  // None: the inputs
  Link<O, &O::outputs> outputs;
  Link<O, &O::constants> constants;
  Link<O, &O::kept_inputs> kept_inputs;
  struct Secured {
    static bool is_true(PyObject* operation) { return as_operation(operation)->operation.secured; }
    static void set(PyObject* operation, bool value) { as_operation(operation)->operation.secured = value; }
  } secured;

  // Calls function(where, version) for each version that it makes, `one` among them (`Operation.made`).
  template <class Function>
  static void each_made(PyObject* operation, PyObject* one, const Function& function) {
    PyObject* outputs = as_operation(operation)->outputs;
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
    PyObject* outputs = as_operation(operation)->outputs;
    if (outputs == nullptr || outputs == Py_None) return;
    auto tell = [&](PyObject* where) {
      if (as_number(where) < 0) function(~as_number(where));
    };
    if (PyLong_Check(outputs)) return tell(outputs);
    for (PyObject* pair : Items(outputs)) tell(PyTuple_GET_ITEM(pair, 0));
  }

  static Reads inputs(PyObject* operation) { return Reads(as_operation(operation)->operation); }
  // `Operation.references_to`.
  static Py_ssize_t references_to(PyObject* operation, PyObject* version) {
    const OperationObject* one = as_operation(operation);
    Py_ssize_t found = std::count(one->operation.begin(), one->operation.end(), node_of(version));
    for (PyObject* sequence : {one->inputs, one->tensors == one->inputs ? nullptr : one->tensors}) {
      if (sequence == nullptr) continue;
      Items items(sequence);
      found += std::count(items.begin(), items.end(), version);
    }
    return found;
  }
};

// Whether the program holds the storage that a version has or had. Set by each extension.
inline bool (*program_has)(const VersionObject*) = nullptr;

// -- their lives ----------------------------------------------------------------------------------------------

// An object that is all zeros. more_bytes: for what the caller puts behind it.
template <class Object>
Ref allocate(PyTypeObject* type, size_t more_bytes = 0) {
  void* memory = PyObject_Malloc(sizeof(Object) + more_bytes);
  if (memory == nullptr) {
    PyErr_NoMemory();
    raise();
  }
  std::memset(memory, 0, sizeof(Object));
  return Ref(PyObject_Init(static_cast<PyObject*>(memory), type));
}

inline void deallocate(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
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

// Begins a version that is resident and has no recipe.
inline void begin_version(VersionObject* one) {
  one->node.extent = -1;
  one->node.resident = true;
  living_versions++;
}

// Lets go of all that a version refers to.
inline void end_version(PyObject* self) {
  VersionObject* one = as_version(self);
  if (one->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  Py_CLEAR(one->watch);
  one->node.forget_policy();
  for (PyObject** link : {&one->uses, &one->needed_by, &one->fingerprint, &one->block, &one->scratch, &one->copy, &one->pin})
    Py_CLEAR(*link);
  if (Operation* maker = std::exchange(one->node.operation, nullptr)) let_go_of_operation(as_object(maker));
  living_versions--;
}

// As `Graph.new_operation` makes it, without anything yet. more_bytes: as for `allocate`.
inline Ref blank_operation(size_t more_bytes = 0) {
  Ref made = allocate<OperationObject>(operation_type, more_bytes);
  as_operation(made.get())->kept_inputs = Ref::copy(nothing).release();
  living_operations++;
  return made;
}

inline void let_go_of_reads(OperationObject* one) {
  Operation reads = one->operation;
  one->operation.reads = nullptr;
  one->operation.count = 0;
  for (Node* read : reads) Py_DECREF(as_object(read));
  if (!one->is_fixed) delete[] reads.reads;
}

inline void delete_operation(PyObject* self) {
  OperationObject* one = as_operation(self);
  if (one->has_recipe) recipes.destroy(one);
  let_go_of_reads(one);
  for (PyObject** link : {&one->recorded, &one->outputs, &one->constants, &one->kept_inputs, &one->inputs, &one->tensors,
                          &one->signature})
    Py_CLEAR(*link);
  living_operations--;
  deallocate(self);
}

// -- for Python ------------------------------------------------------------------------------------------------

// As `core.graph.Version(storage, on_death)`, of an object that is watched.
inline void watch_death(PyObject* self, PyObject* storage, PyObject* on_death) {
  VersionObject* one = as_version(self);
  one->node.key = reinterpret_cast<int64_t>(storage);
  static PyMethodDef tell = {"tell", [](PyObject* both, PyObject*) -> PyObject* {
                               PyObject* version = PyWeakref_GetObject(PyTuple_GET_ITEM(both, 0));
                               if (version == Py_None) Py_RETURN_NONE;
                               return PyObject_CallOneArg(PyTuple_GET_ITEM(both, 1), version);
                             },
                             METH_O, nullptr};
  Ref callback;
  if (on_death != Py_None) {
    Ref weak = checked(PyWeakref_NewRef(self, nullptr));
    Ref both = checked(PyTuple_Pack(2, weak.get(), on_death));
    callback = checked(PyCFunction_New(&tell, both.get()));
  }
  one->watch = checked(PyWeakref_NewRef(storage, callback.get())).release();
}

inline int set_maker(PyObject* self, PyObject* value, void*) {
  if (value == Py_None || value == nullptr) {
    VersionFields::Maker::clear(self);
    return 0;
  }
  if (Py_TYPE(value) != operation_type) {
    PyErr_SetString(PyExc_TypeError, "a version has an Operation");
    return -1;
  }
  VersionFields::Maker::set(self, value);
  return 0;
}

// What depends on the kind of storages.
struct VersionType {
  const char* name;
  int size;
  newfunc make;          // Version(storage, on_death)
  destructor destroy;
  ternaryfunc referent;  // as a weak reference: the storage, or None
};

inline PyTypeObject* make_version_type(const VersionType& kind) {
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
      {"resident", T_BOOL, NODE + offsetof(Version, resident), 0, nullptr},
      {"released", T_BOOL, NODE + offsetof(Version, released), READONLY, nullptr},
      {"superseded", T_BOOL, NODE + offsetof(Version, superseded), 0, nullptr},
      {"used", T_BOOL, NODE + offsetof(Version, used), 0, nullptr},
      {"escaped", T_BOOL, NODE + offsetof(Version, escaped), 0, nullptr},
      {"pin", T_OBJECT, offsetof(V, pin), 0, nullptr},
      {"copy", T_OBJECT, offsetof(V, copy), 0, nullptr},
      {"block", T_OBJECT, offsetof(V, block), 0, nullptr},
      {"needed_by", T_OBJECT, offsetof(V, needed_by), 0, nullptr},
      {"fingerprint", T_OBJECT, offsetof(V, fingerprint), 0, nullptr},
      {"uses", T_OBJECT, offsetof(V, uses), 0, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(V, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef computed[] = {
      {"operation", [](PyObject* self, void*) { return Ref::copy(VersionFields::Maker::get(self)).release(); }, set_maker,
       nullptr, nullptr},
      {"scratch", [](PyObject* self, void*) { return Ref::copy(VersionFields::Scratch::get(self)).release(); },
       [](PyObject* self, PyObject* value, void*) {
         VersionFields::Scratch::set(self, value == nullptr ? Py_None : value);
         return 0;
       },
       nullptr, nullptr},
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
      {"forget_policy", [](PyObject* self, PyObject*) -> PyObject* {
         node_of(self)->forget_policy();
         Py_RETURN_NONE;
       }, METH_NOARGS, "Another policy takes over: this is in no pool, and neither evicted nor released."},
      {nullptr, nullptr, 0, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(kind.make)},
      {Py_tp_call, reinterpret_cast<void*>(kind.referent)},
      {Py_tp_dealloc, reinterpret_cast<void*>(kind.destroy)},
      {Py_tp_members, members},
      {Py_tp_getset, computed},
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char*>("Version(storage, on_death): a `core.graph.Version`.")},
      {0, nullptr},
  };
  PyType_Spec spec = {kind.name, kind.size, 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

inline PyObject* get_recorded(PyObject* self, void*) {
  OperationObject* one = as_operation(self);
  if (one->has_recipe) return recipes.show(one);
  return Ref::copy(one->recorded == nullptr ? Py_None : one->recorded).release();
}

inline int set_recorded(PyObject* self, PyObject* value, void*) {
  OperationObject* one = as_operation(self);
  if (one->has_recipe) recipes.destroy(one);
  one->has_recipe = false;
  Py_XINCREF(value);
  Py_XSETREF(one->recorded, value);
  return 0;
}

inline PyObject* get_inputs(PyObject* self, void*) {
  OperationObject* one = as_operation(self);
  if (one->inputs == nullptr) {
    Reads reads(one->operation);
    one->inputs = PyTuple_New(reads.size());
    if (one->inputs == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < reads.size(); i++) PyTuple_SET_ITEM(one->inputs, i, Ref::copy(reads[i]).release());
  }
  return Ref::copy(one->inputs).release();
}

inline PyObject* get_tensors(PyObject* self, void* closure) {
  PyObject* tensors = as_operation(self)->tensors;
  return tensors == nullptr ? get_inputs(self, closure) : Ref::copy(tensors).release();
}

// A list or a tuple, unless what the operation reads is fixed. Null after an error.
inline Ref new_sequence(PyObject* self, PyObject* value) {
  if (as_operation(self)->is_fixed) {
    PyErr_SetString(PyExc_AttributeError, "what the fast path has recorded is fixed");
    return Ref();
  }
  return Ref(value == nullptr ? nullptr : PySequence_Fast(value, "a list or a tuple is wanted"));
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
  auto** reads = items.size() == 0 ? nullptr : new Node*[static_cast<size_t>(items.size())];
  for (Py_ssize_t i = 0; i < items.size(); i++) reads[i] = node_of(Ref::copy(items[i]).release());
  let_go_of_reads(as_operation(self));
  as_operation(self)->operation.reads = reads;
  as_operation(self)->operation.count = static_cast<uint32_t>(items.size());
  Py_XSETREF(as_operation(self)->inputs, sequence.release());
  return 0;
}

inline int set_tensors(PyObject* self, PyObject* value, void*) {
  Ref sequence = new_sequence(self, value);
  if (!sequence) return -1;
  Py_XSETREF(as_operation(self)->tensors, sequence.release());
  return 0;
}

inline PyTypeObject* make_operation_type(const char* name) {
  using O = OperationObject;
  static PyMemberDef members[] = {
      {"signature", T_OBJECT, offsetof(O, signature), 0, nullptr},
      {"outputs", T_OBJECT, offsetof(O, outputs), 0, nullptr},
      {"constants", T_OBJECT, offsetof(O, constants), 0, nullptr},
      {"kept_inputs", T_OBJECT, offsetof(O, kept_inputs), 0, nullptr},
      {"secured", T_BOOL, offsetof(O, operation) + offsetof(Operation, secured), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef computed[] = {
      {"recorded", get_recorded, set_recorded, nullptr, nullptr},
      {"inputs", get_inputs, set_inputs, nullptr, nullptr},
      {"tensors", get_tensors, set_tensors, nullptr, nullptr},
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
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(+make)},
      {Py_tp_methods, methods},
      {Py_tp_dealloc, reinterpret_cast<void*>(delete_operation)},
      {Py_tp_members, members},
      {Py_tp_getset, computed},
      {Py_tp_doc, const_cast<char*>("A `core.graph.Operation`.")},
      {0, nullptr},
  };
  PyType_Spec spec = {name, sizeof(O), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun
