// The policy of a session, put together, and as an object of Python.
//
// What it chooses is what `core.search.make_policy` chooses by the same heuristic: each part says which one in Python
// it is. Those remain the reference, which the simulator runs. All of this is done with the GIL.
#pragma once

#include "components.h"
#include "search.h"

namespace dtrrun {

class Policy {
 public:
  explicit Policy(PyObject* heuristic)
      : heuristic_(Ref::copy(heuristic)), score_(heuristic), pool_(nodes_),
        foresight_(nodes_), neighbourhood_(neighbourhood(attribute(heuristic, "neighbourhood").get())),
        search_(nodes_, pool_, *neighbourhood_, foresight_, score_, typeid(*neighbourhood_) == typeid(Neighbourhood)) {}

  size_t size() const { return pool_.items.size(); }
  PyObject* heuristic() const { return heuristic_.get(); }
  Ref nodes() const { return pool_.nodes(); }
  PyObject* foresight() const { return foresight_.object(); }
  void follow(PyObject* foresight) { foresight_.follow(foresight); }
  int64_t& nbytes() { return pool_.nbytes; }
  int64_t& score_evaluations() { return search_.score_evaluations; }
  int64_t& scoring_ns() { return search_.scoring_ns; }
  int64_t& search_ns() { return search_ns_; }
  int traverse(visitproc visit, void* arg) const {
    int stopped = pool_.traverse(visit, arg);
    return stopped != 0 ? stopped : foresight_.traverse(visit, arg);
  }
  void clear() {
    pool_.clear();
    foresight_.clear();
  }

  // -- events --

  void insert(PyObject* node) { pool_.insert(node); }
  void discard(PyObject* node) { pool_.discard(node); }
  void evicted(PyObject* node) {
    Ref kept = Ref::copy(node);
    pool_.discard(node);
    if (!nodes_.constant(node)) neighbourhood_->evicted(node);
  }
  void released(PyObject* node) {
    Ref kept = Ref::copy(node);
    pool_.discard(node);
    if (!nodes_.constant(node)) neighbourhood_->released(node);
  }
  // It was rematerialized, or will never be.
  void left(PyObject* node) { neighbourhood_->left(node); }
  void cost_changed(PyObject* node) {
    Item* item = pool_.find(node);
    if (item == nullptr) return;
    pool_.make_due(nodes_.version.bound.number(node), *item);
    neighbourhood_->changed(*item);
  }
  int64_t projected_cost(PyObject* node) {
    neighbourhood_->settle();
    Item* item = pool_.find(node);
    if (item == nullptr) return nodes_.version.cost.number(node);
    return neighbourhood_->projected_cost(node, nodes_.version.bound.number(node), *item);
  }

  // Returns the node with the least score of those for which `evictable(node)` is true, or null.
  template <class Evictable>
  Ref select(int64_t now, const Evictable& evictable) {
    int64_t started = now_ns(), scoring = scoring_ns();
    Ref chosen;
    try {
      neighbourhood_->settle();
      search_.look_ahead();
      chosen = search_.choose(now, evictable);
    } catch (...) {  // the nodes under consideration must not be lost
      pool_.make_all_due();
      throw;
    }
    search_ns_ += now_ns() - started - (scoring_ns() - scoring);
    return chosen;
  }

 private:
  std::unique_ptr<Neighbourhood> neighbourhood(PyObject* name) {
    auto is = [&](const char* one) { return PyUnicode_CompareWithASCIIString(name, one) == 0; };
    if (is("eqclass")) return std::make_unique<Components>(nodes_, pool_);
    if (is("none")) return std::make_unique<Neighbourhood>(nodes_, pool_);
    return std::make_unique<ExactNeighbourhood>(nodes_, pool_, is("ancestors"), score_.foresight > 0);
  }

  Ref heuristic_;
  Nodes nodes_;
  Score score_;
  Pool pool_;
  Foresight foresight_;
  std::unique_ptr<Neighbourhood> neighbourhood_;
  Search search_;
  int64_t search_ns_ = 0;
};

// -- for Python ------------------------------------------------------------------------------------------

// A `core.pool.Policy`.
struct PolicyObject {
  PyObject_HEAD
  Policy* policy;
};

inline PyTypeObject* policy_type = nullptr;

inline Policy& policy_of(PyObject* self) { return *reinterpret_cast<PolicyObject*>(self)->policy; }

inline PyObject* native_version(PyObject* object) {
  if (Py_TYPE(object) == version_type) return object;
  PyErr_SetString(PyExc_TypeError, "this policy is for native versions");
  raise();
}

template <void (Policy::*event)(PyObject*)>
PyObject* told(PyObject* self, PyObject* node) {
  return guarded([&]() -> PyObject* {
    (policy_of(self).*event)(native_version(node));
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

inline PyObject* new_policy(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* heuristic;
  if (!PyArg_ParseTuple(args, "O", &heuristic)) return nullptr;
  return guarded([&]() -> PyObject* {
    auto made = std::make_unique<Policy>(heuristic);
    Ref self = checked(type->tp_alloc(type, 0));
    reinterpret_cast<PolicyObject*>(self.get())->policy = made.release();
    return self.release();
  });
}

inline PyTypeObject* make_policy_type() {
  static PyMethodDef methods[] = {
      {"insert", told<&Policy::insert>, METH_O, "See core.pool.Policy, like the others."},
      {"discard", told<&Policy::discard>, METH_O, nullptr},
      {"evicted", told<&Policy::evicted>, METH_O, nullptr},
      {"released", told<&Policy::released>, METH_O, nullptr},
      {"rematerialized", told<&Policy::left>, METH_O, nullptr},
      {"forget", told<&Policy::left>, METH_O, nullptr},
      {"cost_changed", told<&Policy::cost_changed>, METH_O, nullptr},
      {"projected_cost",
       [](PyObject* self, PyObject* node) -> PyObject* {
         return guarded([&] { return PyLong_FromLongLong(policy_of(self).projected_cost(native_version(node))); });
       },
       METH_O, nullptr},
      {"select",
       [](PyObject* self, PyObject* args) -> PyObject* {
         long long now;
         PyObject* evictable;
         if (!PyArg_ParseTuple(args, "LO", &now, &evictable)) return nullptr;
         return guarded([&]() -> PyObject* {
           Ref chosen = policy_of(self).select(now, [&](PyObject* node) {
             int is_true = PyObject_IsTrue(checked(PyObject_CallOneArg(evictable, node)).get());
             if (is_true < 0) raise();
             return is_true == 1;
           });
           return chosen ? chosen.release() : Ref::copy(Py_None).release();
         });
       },
       METH_VARARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef attributes[] = {
      {"nbytes", counted<&Policy::nbytes>, nullptr, nullptr, nullptr},
      {"score_evaluations", counted<&Policy::score_evaluations>, set_count<&Policy::score_evaluations>, nullptr, nullptr},
      {"scoring_ns", counted<&Policy::scoring_ns>, set_count<&Policy::scoring_ns>, nullptr, nullptr},
      {"search_ns", counted<&Policy::search_ns>, set_count<&Policy::search_ns>, nullptr, nullptr},
      {"foresight", [](PyObject* self, void*) { return Ref::copy(policy_of(self).foresight()).release(); },
       [](PyObject* self, PyObject* foresight, void*) {
         Ref done(guarded([&]() -> PyObject* {
           policy_of(self).follow(foresight == nullptr ? Py_None : foresight);
           Py_RETURN_NONE;
         }));
         return done ? 0 : -1;
       },
       nullptr, nullptr},
      {"heuristic", [](PyObject* self, void*) { return Ref::copy(policy_of(self).heuristic()).release(); }, nullptr,
       nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  auto length = [](PyObject* self) { return static_cast<Py_ssize_t>(policy_of(self).size()); };
  auto iterate = [](PyObject* self) -> PyObject* {
    return guarded([&] { return PyObject_GetIter(policy_of(self).nodes().get()); });
  };
  auto traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
    Py_VISIT(Py_TYPE(self));
    Policy* policy = reinterpret_cast<PolicyObject*>(self)->policy;
    return policy == nullptr ? 0 : policy->traverse(visit, arg);
  };
  auto clear = [](PyObject* self) -> int {
    if (Policy* policy = reinterpret_cast<PolicyObject*>(self)->policy) policy->clear();
    return 0;
  };
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    delete reinterpret_cast<PolicyObject*>(self)->policy;
    type->tp_free(self);
    Py_DECREF(type);
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(new_policy)},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {Py_sq_length, reinterpret_cast<void*>(+length)},
      {Py_tp_iter, reinterpret_cast<void*>(+iterate)},
      {Py_tp_traverse, reinterpret_cast<void*>(+traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(+clear)},
      {Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
      {Py_tp_doc, const_cast<char*>("Policy(heuristic): `core.search.HeapSearch`, of native versions, for heuristics with `powers`.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"_dtrrun_native.Policy", sizeof(PolicyObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  bool made = make_type<EvictedObject>("_dtrrun_native.Evicted") &&
              make_type<DependentsObject>("_dtrrun_native.Dependents") &&
              make_type<NumbersObject>("_dtrrun_native.Numbers");
  if (!made) return nullptr;
  return policy_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun
