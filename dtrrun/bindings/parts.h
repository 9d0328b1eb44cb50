// The parts of a core that Python calls, besides the ledger: `Recipes`, `Deallocation`, `Eviction`, `Rematerializer`. Each is the
// base class of the one in dtrrun/core.
#pragma once

#include "ledger.h"

namespace dtrrun {

struct PartObject {
  PyObject_HEAD
  PyObject* ledger;
};

inline PyObject* ledger_of(PyObject* part) { return reinterpret_cast<PartObject*>(part)->ledger; }
inline Core& core_of_part(PyObject* part) { return core_of(ledger_of(part)); }

// Part(ledger, ...): the other arguments are for the derived class.
inline PyObject* new_part(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* ledger = PyTuple_GET_SIZE(args) == 0 ? Py_None : PyTuple_GET_ITEM(args, 0);
  if (!PyObject_TypeCheck(ledger, ledger_type)) {
    PyErr_SetString(PyExc_TypeError, "the ledger of the same extension is wanted");
    return nullptr;
  }
  PyObject* made = type->tp_alloc(type, 0);
  if (made != nullptr) reinterpret_cast<PartObject*>(made)->ledger = Ref::copy(ledger).release();
  return made;
}

template <auto part, auto member>
PyObject* get_number(PyObject* self, void*) {
  return PyLong_FromLongLong(core_of_part(self).*part.*member);
}
template <auto part, auto member>
int set_number(PyObject* self, PyObject* value, void*) {
  return read_number(value, core_of_part(self).*part.*member) ? 0 : -1;
}
#define DTRRUN_NUMBER(name, part, member) \
  {name, get_number<&Core::part, member>, set_number<&Core::part, member>, nullptr, nullptr}

// Calls a method of one of the parts with a version.
template <auto part, auto function>
PyObject* with_version(PyObject* self, PyObject* version) {
  return guarded([&]() -> PyObject* {
    auto& of = core_of_part(self).*part;
    if constexpr (std::is_void_v<decltype((of.*function)(nullptr))>) {
      (of.*function)(native_node(version));
      Py_RETURN_NONE;
    } else {
      return PyBool_FromLong((of.*function)(native_node(version)));
    }
  });
}

// The same, with the reason why the version stays in memory.
template <auto part, auto function>
PyObject* with_pin(PyObject* self, PyObject* args) {
  PyObject *version, *why;
  if (!PyArg_ParseTuple(args, "OO", &version, &why)) return nullptr;
  return done([&] { (core_of_part(self).*part.*function)(native_node(version), as_pin(why)); });
}

// Throws if `object` is not an operation.
inline Recorded* native_operation(PyObject* object) {
  if (Py_TYPE(object) == operation_type) return recorded_in(object);
  PyErr_SetString(PyExc_TypeError, "an operation is wanted");
  raise();
}

inline std::vector<VersionRef> versions_in(PyObject* sequence) {
  Ref items = checked(PySequence_Fast(sequence, "versions must be a sequence"));
  std::vector<VersionRef> found;
  for (PyObject* one : Items(items.get())) found.emplace_back(native_node(one));
  return found;
}

inline PyTypeObject* make_part_type(const std::string& name, PyMethodDef* methods, PyGetSetDef* computed) {
  static PyMemberDef none[] = {{nullptr, 0, 0, 0, nullptr}};
  return Base<PartObject, &PartObject::ledger>::make(name, new_part, none, methods, computed, nullptr);
}

inline PyTypeObject* make_recipes_type(const std::string& module) {
  static PyMethodDef methods[] = {
      {"make_constant", with_pin<&Core::recipes, &Recipes::make_constant>, METH_VARARGS,
       "make_constant(version, pin): drop the recipe of a resident version, so that it can't be evicted any more. pin: the reason."},
      {"secure", with_version<&Core::recipes, &Recipes::secure>, METH_O,
       "Make sure that a version stays recomputable, or return False: an input is lost."},
      {"pin", with_pin<&Core::mutation, &Mutation::pin>, METH_VARARGS,
       "pin(version, why): keep a resident version in memory from now on, for a reason."},
      {"lose", with_version<&Core::recipes, &Recipes::lose>, METH_O,
       "A version that is not in memory can't be recomputed any more."},
      {"supersede",
       [](PyObject* self, PyObject* args) -> PyObject* {
         PyObject *version, *operation;
         long long cost;
         if (!PyArg_ParseTuple(args, "OOL", &version, &operation, &cost)) return nullptr;
         return guarded([&] {
           Recorded* maker = operation == Py_None ? nullptr : native_operation(operation);
           return as_object(core_of_part(self).recipes.supersede(native_node(version), maker, cost).get()).release();
         });
       },
       METH_VARARGS,
       "supersede(version, operation, cost): make a new version that takes over the storage of one that has been mutated, and return "
       "it. operation: the mutation as a recipe, or None if there is none. cost: that of the operation, in ns."},
      {"half_written",
       [](PyObject* self, PyObject* version) -> PyObject* {
         return guarded([&] { return as_object(core_of_part(self).recipes.half_written(native_node(version)).get()).release(); });
       },
       METH_O,
       "A failed operator may have written to the storage. Return the version that it has now, a constant, or None; the old version "
       "keeps its recipe."},
      {"end_counting", [](PyObject* self, PyObject*) { return done([&] { core_of_part(self).recipes.end_counting(); }); },
       METH_NOARGS, "Record operators again, if they are only counted at present. What there is stays in memory."},
      {"end", [](PyObject* self, PyObject*) { return done([&] { core_of_part(self).recipes.end(); }); }, METH_NOARGS,
       "Nothing will be recomputed any more: let go of the storages that recipes have kept alive."},
      {nullptr, nullptr, 0, nullptr},
  };
  return make_part_type(module + ".Recipes", methods, nothing_computed);
}

inline PyTypeObject* make_deallocation_type(const std::string& module) {
  static PyGetSetDef computed[] = {
      DTRRUN_NUMBER("kept", deallocation, &Deallocation::kept),
      DTRRUN_NUMBER("scratch_shift", deallocation, &Deallocation::scratch_shift),
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyMethodDef methods[] = {
      {"free_all_unread_scratch",
       [](PyObject* self, PyObject*) -> PyObject* {
         return done([&] { core_of_part(self).deallocation.free_all_unread_scratch(core_of_part(self).eviction.evictions); });
       },
       METH_NOARGS, "Free the scratch versions that no recipe reads any more."},
      {nullptr, nullptr, 0, nullptr},
  };
  return make_part_type(module + ".Deallocation", methods, computed);
}

inline PyTypeObject* make_eviction_type(const std::string& module) {
  static PyMethodDef methods[] = {
      {"try_room",
       [](PyObject* self, PyObject* nbytes) -> PyObject* {
         return guarded([&] { return PyBool_FromLong(core_of_part(self).eviction.try_room(as_number(nbytes))); });
       },
       METH_O, "Evict until so many bytes more fit into the budget. Returns whether they do."},
      {"evict_to",
       [](PyObject* self, PyObject* most) -> PyObject* {
         return guarded([&] { return PyBool_FromLong(core_of_part(self).eviction.evict_to(as_number(most))); });
       },
       METH_O, "Evict until at most so many bytes are resident. Returns False if nothing is left to evict."},
      {"may_be_evicted", with_version<&Core::eviction, &Eviction::may_be_evicted>, METH_O,
       "Return whether a version may be evicted, provided that its recipe can be secured."},
      {"could_leave", with_version<&Core::eviction, &Eviction::could_leave>, METH_O,
       "Return whether a constant, locked or not, may leave for the host: only operators can reach its memory."},
      {"evict_if_possible", with_version<&Core::eviction, &Eviction::evict_if_possible>, METH_O,
       "Evict this version, whatever its score. Returns whether that was possible."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef computed[] = {
      DTRRUN_NUMBER("evictions", eviction, &Eviction::evictions),
      DTRRUN_NUMBER("evicted_bytes_total", eviction, &Eviction::evicted_bytes_total),
      DTRRUN_NUMBER("over_budget", eviction, &Eviction::over_budget),
      DTRRUN_NUMBER("making_room_ns", eviction, &Eviction::making_room_ns),
      DTRRUN_NUMBER("dear_part", eviction, &Eviction::dear_part),
      DTRRUN_NUMBER("replaying", ledger, &Ledger::replaying),
      {"warn_only", [](PyObject* self, void*) { return PyBool_FromLong(core_of_part(self).eviction.warn_only); },
       [](PyObject* self, PyObject* value, void*) {
         core_of_part(self).eviction.warn_only = value != nullptr && PyObject_IsTrue(value) == 1;
         return 0;
       },
       nullptr, nullptr},
      {"adapts", [](PyObject* self, void*) { return PyBool_FromLong(core_of_part(self).eviction.adapts); },
       [](PyObject* self, PyObject* value, void*) {
         core_of_part(self).eviction.adapts = value != nullptr && PyObject_IsTrue(value) == 1;
         return 0;
       },
       nullptr, nullptr},
      {"evicted_by",
       [](PyObject* self, void*) { return guarded([&] { return core_of_part(self).tallies.evictions().release(); }); }, nullptr,
       nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  return make_part_type(module + ".Eviction", methods, computed);
}

inline PyTypeObject* make_rematerializer_type(const std::string& module) {
  static PyMethodDef methods[] = {
      {"materialize", with_keywords([](PyObject* self, PyObject* args, PyObject* named) -> PyObject* {
         PyObject* targets;
         int locked = 1;
         static const char* names[] = {"targets", "locked", nullptr};
         if (!PyArg_ParseTupleAndKeywords(args, named, "O|$p", const_cast<char**>(names), &targets, &locked)) return nullptr;
         return done([&] { core_of_part(self).rematerializer.materialize(versions_in(targets), locked != 0); });
       }),
       METH_VARARGS | METH_KEYWORDS,
       "materialize(targets, *, locked=True): make all targets resident. locked: whether the caller has locked them.\n\n"
       "Raises the budget error. Locks taken here are released."},
      {"under_way_ns",
       [](PyObject* self, PyObject*) { return PyLong_FromLongLong(core_of_part(self).rematerializer.under_way_ns()); },
       METH_NOARGS, "Bookkeeping time of the current rematerialization, which is counted only at its end."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef computed[] = {
      DTRRUN_NUMBER("rematerializations", recomputer, &Recomputer::rematerializations),
      DTRRUN_NUMBER("rematerialized_bytes", recomputer, &Recomputer::rematerialized_bytes),
      DTRRUN_NUMBER("operators_ns", ledger, &Ledger::recomputed_ns),
      DTRRUN_NUMBER("frugal_runs", rematerializer, &Rematerializer::frugal_runs),
      DTRRUN_NUMBER("last_planned", rematerializer, &Rematerializer::last_planned),
      {"by_operator", [](PyObject* self, void*) { return guarded([&] { return core_of_part(self).tallies.runs().release(); }); },
       nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  return make_part_type(module + ".Rematerializer", methods, computed);
}
#undef DTRRUN_NUMBER

}  // namespace dtrrun
