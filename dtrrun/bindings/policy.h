// A policy as a Python object. All of this runs with the GIL held.
#pragma once

#include "../core/policy/policy.h"
#include "foresight.h"

namespace dtrrun {

inline double as_double(PyObject* number) {
  double found = PyFloat_AsDouble(number);
  if (found == -1 && PyErr_Occurred()) raise();
  return found;
}
inline double attribute_double(PyObject* object, const char* name) { return as_double(attribute(object, name).get()); }

inline Neighbours as_neighbours(PyObject* name) {
  auto is = [&](const char* one) { return PyUnicode_CompareWithASCIIString(name, one) == 0; };
  if (is("eqclass")) return Neighbours::EQCLASS;
  if (is("ancestors")) return Neighbours::ANCESTORS;
  return is("e_star") ? Neighbours::E_STAR : Neighbours::NONE;
}

// Converts a `core.heuristics.Heuristic`.
inline Heuristic as_heuristic(PyObject* given) {
  Heuristic made{};
  made.neighbours = as_neighbours(attribute(given, "neighbourhood").get());
  made.released = attribute_double(given, "released");
  made.foresight = attribute_double(given, "foresight");
  Ref powers = attribute(given, "powers");
  if (powers.get() == Py_None) {
    auto score = std::make_shared<Ref>(attribute(given, "score"));
    made.function = [score](int64_t size, int64_t staleness, int64_t cost, int64_t projected_cost) {
      Ref found =
          checked(PyObject_CallFunction(score->get(), "LLLL", static_cast<long long>(size), static_cast<long long>(staleness),
                                        static_cast<long long>(cost), static_cast<long long>(projected_cost)));
      return as_double(found.get());
    };
    return made;
  }
  PyObject *cost, *size, *staleness;
  if (!PyArg_ParseTuple(powers.get(), "OOO", &cost, &size, &staleness)) raise();
  made.cost = PyObject_IsTrue(cost);
  made.size = PyObject_IsTrue(size);
  made.staleness = PyObject_IsTrue(staleness);
  made.root = PyFloat_Check(staleness);
  made.exponent = made.staleness ? as_double(staleness) : 1;
  return made;
}

// Wraps the method `sample` of a `random.Random`, called as sample(range(n), k).
inline Scan::Sample as_sample(PyObject* given) {
  if (given == Py_None) return nullptr;
  auto sample = std::make_shared<Ref>(Ref::copy(given));
  return [sample](size_t n, size_t k) {
    Ref all = checked(PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyRange_Type), "n", static_cast<Py_ssize_t>(n)));
    Ref found = checked(PyObject_CallFunction(sample->get(), "On", all.get(), static_cast<Py_ssize_t>(k)));
    std::vector<size_t> places;
    for (PyObject* one : Items(found.get())) places.push_back(static_cast<size_t>(as_number(one)));
    return places;
  };
}

struct PolicyObject {
  PyObject_HEAD
  Policy* policy;
  PyObject* heuristic;
  RecordedForesight* foresight;  // the policy's, or null
};

inline PyTypeObject* policy_type = nullptr;

inline PolicyObject* as_policy(PyObject* object) { return reinterpret_cast<PolicyObject*>(object); }
inline Policy& policy_of(PyObject* self) { return *as_policy(self)->policy; }

template <void (Policy::*event)(Node*)>
PyObject* told(PyObject* self, PyObject* version) {
  return guarded([&]() -> PyObject* {
    (policy_of(self).*event)(native_node(version));
    Py_RETURN_NONE;
  });
}

template <int64_t& (Policy::*counter)()>
PyObject* counted(PyObject* self, void*) {
  return PyLong_FromLongLong((policy_of(self).*counter)());
}

template <int64_t& (Policy::*counter)()>
int set_count(PyObject* self, PyObject* value, void*) {
  int64_t number = value == nullptr ? -1 : as_number(value);
  if (number == -1) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "not a count");
    return -1;
  }
  (policy_of(self).*counter)() = number;
  return 0;
}

inline PyObject* new_policy(PyTypeObject* type, PyObject* args, PyObject* named) {
  PyObject *heuristic, *sample = Py_None;
  int latest = 0, scan = 0;
  double ignore_small = 0;
  static const char* names[] = {"heuristic", "latest", "scan", "ignore_small", "sample", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, named, "O|$ppdO", const_cast<char**>(names), &heuristic, &latest, &scan, &ignore_small,
                                   &sample))
    return nullptr;
  return guarded([&]() -> PyObject* {
    Policy::Options options{latest != 0, scan != 0, ignore_small, as_sample(sample)};
    auto made = std::make_unique<Policy>(as_heuristic(heuristic), std::move(options));
    Ref self = checked(type->tp_alloc(type, 0));
    as_policy(self.get())->policy = made.release();
    as_policy(self.get())->heuristic = Ref::copy(heuristic).release();
    return self.release();
  });
}

inline int set_foresight(PyObject* self, PyObject* given, void*) {
  Ref done(guarded([&]() -> PyObject* {
    std::unique_ptr<RecordedForesight> made;
    if (given != nullptr && given != Py_None) made = std::make_unique<RecordedForesight>(given);
    as_policy(self)->foresight = made.get();
    policy_of(self).follow(std::move(made));
    Py_RETURN_NONE;
  }));
  return done ? 0 : -1;
}

// Returns the nodes in the order in which they were inserted.
inline Ref nodes_in(const Pool& pool) {
  std::vector<int64_t> numbers = pool.numbers();
  Ref list = checked(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; i < numbers.size(); i++)
    PyList_SET_ITEM(list.get(), i, as_object(pool.find(numbers[i])->node.get()).release());
  return list;
}

inline PyTypeObject* make_policy_type(const std::string& module) {
  static PyMethodDef methods[] = {
      {"insert", told<&Policy::insert>, METH_O, "See core.backend.Policy, like the others."},
      {"discard", told<&Policy::discard>, METH_O, nullptr},
      {"evicted", told<&Policy::evicted>, METH_O, nullptr},
      {"released", told<&Policy::released>, METH_O, nullptr},
      {"rematerialized", told<&Policy::left>, METH_O, nullptr},
      {"forget", told<&Policy::left>, METH_O, nullptr},
      {"cost_changed", told<&Policy::cost_changed>, METH_O, nullptr},
      {"projected_cost",
       [](PyObject* self, PyObject* version) -> PyObject* {
         return guarded([&] { return PyLong_FromLongLong(policy_of(self).projected_cost(native_node(version))); });
       },
       METH_O, nullptr},
      {"let_copy",
       [](PyObject* self, PyObject* cost) -> PyObject* {
         return guarded([&]() -> PyObject* {
           auto kept = std::make_shared<Ref>(Ref::copy(cost));
           policy_of(self).let_copy([kept](const Node* node) {
             Ref found = checked(PyObject_CallOneArg(kept->get(), as_object(const_cast<Node*>(node)).get()));
             return found.get() == Py_None ? NEVER : as_number(found.get());
           });
           Py_RETURN_NONE;
         });
       },
       METH_O, nullptr},
      {"select",
       [](PyObject* self, PyObject* args) -> PyObject* {
         long long now;
         PyObject* evictable;
         if (!PyArg_ParseTuple(args, "LO", &now, &evictable)) return nullptr;
         return guarded([&]() -> PyObject* {
           KeptNode chosen = policy_of(self).select(now, [&](Node* node) {
             int is_true = PyObject_IsTrue(checked(PyObject_CallOneArg(evictable, as_object(node).get())).get());
             if (is_true < 0) raise();
             return is_true == 1;
           });
           return as_object(chosen.get()).release();
         });
       },
       METH_VARARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef attributes[] = {
      {"nbytes", [](PyObject* self, void*) { return PyLong_FromLongLong(policy_of(self).pool().nbytes); }, nullptr, nullptr,
       nullptr},
      {"accesses", [](PyObject* self, void*) { return PyLong_FromLongLong(policy_of(self).accesses()); }, nullptr, nullptr,
       nullptr},
      {"score_evaluations", counted<&Policy::score_evaluations>, set_count<&Policy::score_evaluations>, nullptr, nullptr},
      {"scoring_ns", counted<&Policy::scoring_ns>, set_count<&Policy::scoring_ns>, nullptr, nullptr},
      {"search_ns", counted<&Policy::search_ns>, set_count<&Policy::search_ns>, nullptr, nullptr},
      {"foresight",
       [](PyObject* self, void*) {
         const RecordedForesight* found = as_policy(self)->foresight;
         return Ref::copy(found == nullptr ? Py_None : found->object()).release();
       },
       set_foresight, nullptr, nullptr},
      {"heuristic", [](PyObject* self, void*) { return Ref::copy(as_policy(self)->heuristic).release(); }, nullptr, nullptr,
       nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  auto length = [](PyObject* self) { return static_cast<Py_ssize_t>(policy_of(self).size()); };
  auto iterate = [](PyObject* self) -> PyObject* {
    return guarded([&] { return PyObject_GetIter(nodes_in(policy_of(self).pool()).get()); });
  };
  auto traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(as_policy(self)->heuristic);
    if (as_policy(self)->policy == nullptr) return 0;
    return as_policy(self)->foresight == nullptr ? 0 : as_policy(self)->foresight->traverse(visit, arg);
  };
  auto clear = [](PyObject* self) -> int {
    if (as_policy(self)->policy == nullptr) return 0;
    policy_of(self).clear();
    set_foresight(self, nullptr, nullptr);
    return 0;
  };
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    delete as_policy(self)->policy;
    Py_CLEAR(as_policy(self)->heuristic);
    type->tp_free(self);
    Py_DECREF(type);
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(new_policy)},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {Py_sq_length, reinterpret_cast<void*>(+length)},
      {Py_tp_iter, reinterpret_cast<void*>(+iterate)},
      {Py_tp_traverse, reinterpret_cast<void*>(+traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(+clear)},
      {Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
      {Py_tp_doc, const_cast<char*>("A `core.backend.Policy`.")},
      {0, nullptr},
  };
  static std::string name = module + ".Policy";
  PyType_Spec spec = {name.c_str(), sizeof(PolicyObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun
