// The C++ base class of `core.ledger.Ledger`. It owns the core of a session or of a simulation.
#pragma once

#include "../core/history.h"
#include "../core/operator.h"
#include "bind.h"
#include "policy.h"
#include "signature.h"
#include "tallies.h"

namespace dtrrun {

// The core, assembled from its parts.
struct Core {
  virtual ~Core() = default;
  std::unique_ptr<Backend> backend;
  Ledger ledger;
  Recipes recipes{ledger};
  Deallocation deallocation{ledger};
  Eviction eviction{ledger, recipes, deallocation};
  Recomputer recomputer{ledger, deallocation, eviction};
  Rematerializer rematerializer{ledger, deallocation, eviction, recomputer};
  Copies copies{ledger, eviction};
  Rescue rescue{ledger, recipes, rematerializer};
  Mutation mutation{ledger, recipes, copies, rescue};
  Operators operators{ledger, recipes, eviction, rematerializer, mutation};
  Tallies tallies;

  Core(std::unique_ptr<Backend> given, void (*forget)(Version*)) : backend(std::move(given)), ledger(*backend, forget) {}
};

struct LedgerObject {
  PyObject_HEAD
  Core* core;
  // `dtr`: the `core.dtr.DTR`.
  PyObject *policy, *heap, *fingerprints, *outside, *observers, *decision_observers, *dtr;

  static void end(PyObject* self) { delete std::exchange(reinterpret_cast<LedgerObject*>(self)->core, nullptr); }
};

inline PyTypeObject* ledger_type = nullptr;

inline LedgerObject* as_ledger(PyObject* object) { return reinterpret_cast<LedgerObject*>(object); }
inline Core& core_of(PyObject* ledger) { return *as_ledger(ledger)->core; }
inline PyObject* or_none(PyObject* link) { return link == nullptr ? Py_None : link; }

// Defined by each extension.
std::unique_ptr<Core> make_core(PyObject* ledger);

// -- `Ledger.versions`, a mapping -----------------------------------------------------------------------------

struct VersionsObject {
  PyObject_HEAD
  PyObject* ledger;
};

inline PyTypeObject* versions_type = nullptr;

inline Versions& versions_of(PyObject* self) { return core_of(reinterpret_cast<VersionsObject*>(self)->ledger).ledger.versions; }

// `values()` or `items()`, or an iterator over them.
struct ViewObject {
  PyObject_HEAD
  PyObject* table;
  Version* next;
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
  Version* one = view->next;
  if (one == nullptr) return nullptr;
  view->next = view->backward ? one->before : one->after;
  if (view->items) return Py_BuildValue("(LO)", static_cast<long long>(one->key), as_object(one).get());
  return as_object(one).release();
}

inline bool make_view_types(const std::string& module) {
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_DECREF(reinterpret_cast<ViewObject*>(self)->table);
    type->tp_free(self);
    Py_DECREF(type);
  };
  static PyMethodDef methods[] = {
      {"__reversed__",
       [](PyObject* self, PyObject*) -> PyObject* {
         auto* view = reinterpret_cast<ViewObject*>(self);
         return make_view(iterator_type, view->table, view->items, true);
       },
       METH_NOARGS, nullptr},
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
  static std::string view_name = module + ".View", iterator_name = module + ".Iterator";
  PyType_Spec view = {view_name.c_str(), sizeof(ViewObject), 0, flags, of_view};
  PyType_Spec iterator = {iterator_name.c_str(), sizeof(ViewObject), 0, flags, of_iterator};
  view_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&view));
  iterator_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&iterator));
  return view_type != nullptr && iterator_type != nullptr;
}

inline PyTypeObject* make_versions_type(const std::string& module) {
  if (!make_view_types(module)) return nullptr;
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_DECREF(reinterpret_cast<VersionsObject*>(self)->ledger);
    type->tp_free(self);
    Py_DECREF(type);
  };
  auto length = [](PyObject* self) { return static_cast<Py_ssize_t>(versions_of(self).size()); };
  auto contains = [](PyObject* self, PyObject* key) -> int { return versions_of(self).find(as_number(key)) != nullptr; };
  auto get = [](PyObject* self, PyObject* key) -> PyObject* {
    if (Version* found = versions_of(self).find(as_number(key))) return as_object(found).release();
    PyErr_SetObject(PyExc_KeyError, key);
    return nullptr;
  };
  auto set = [](PyObject* self, PyObject* key, PyObject* value) -> int {
    int64_t number = as_number(key);
    if (value == nullptr) {
      if (versions_of(self).remove(number)) return 0;
      PyErr_SetObject(PyExc_KeyError, key);
      return -1;
    }
    if (Py_TYPE(value) != version_type || node_of(value)->key != number) {
      PyErr_SetString(PyExc_TypeError, "a version, by its key, is wanted");
      return -1;
    }
    versions_of(self).put(node_of(value));
    return 0;
  };
  static PyMethodDef methods[] = {
      {"get",
       [](PyObject* self, PyObject* key) -> PyObject* { return as_object(versions_of(self).find(as_number(key))).release(); },
       METH_O, nullptr},
      {"values", [](PyObject* self, PyObject*) { return make_view(view_type, self, false, false); }, METH_NOARGS, nullptr},
      {"items", [](PyObject* self, PyObject*) { return make_view(view_type, self, true, false); }, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
      {Py_tp_methods, methods},
      {Py_mp_length, reinterpret_cast<void*>(+length)},
      {Py_mp_subscript, reinterpret_cast<void*>(+get)},
      {Py_mp_ass_subscript, reinterpret_cast<void*>(+set)},
      {Py_sq_contains, reinterpret_cast<void*>(+contains)},
      {0, nullptr},
  };
  static std::string name = module + ".Versions";
  PyType_Spec spec = {name.c_str(), sizeof(VersionsObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// -- figures --------------------------------------------------------------------------------------------------

template <int64_t Ledger::* member>
PyObject* get_figure(PyObject* self, void*) {
  return PyLong_FromLongLong(core_of(self).ledger.*member);
}
template <int64_t Ledger::* member>
int set_figure(PyObject* self, PyObject* value, void*) {
  return read_number(value, core_of(self).ledger.*member) ? 0 : -1;
}

// -- deaths ---------------------------------------------------------------------------------------------------

// Receives the deaths that Python's weak references report. Outlives the ledger.
struct Told {
  std::shared_ptr<DeadVersions> dead;
  std::shared_ptr<Debts> debts;
};

// Called at any moment and in any thread, so it only queues. one: a version or a `core.ledger.Block`.
inline PyObject* tell_death(PyObject* capsule, PyObject* one) {
  return done([&] {
    auto& told = *static_cast<Told*>(PyCapsule_GetPointer(capsule, nullptr));
    if (Py_TYPE(one) == version_type)
      told.dead->append(node_of(one));
    else
      told.debts->counted_bytes += attribute_number(one, "nbytes");
  });
}

inline PyObject* make_on_death(PyObject* self, void*) {
  static PyMethodDef tell = {"on_death", tell_death, METH_O, "The storage of a version, or the owner of a block, has died."};
  return guarded([&]() -> PyObject* {
    Ledger& ledger = core_of(self).ledger;
    auto told = std::make_unique<Told>(Told{ledger.dead, ledger.debts});
    Ref capsule = checked(
        PyCapsule_New(told.get(), nullptr, [](PyObject* one) { delete static_cast<Told*>(PyCapsule_GetPointer(one, nullptr)); }));
    told.release();
    return PyCFunction_New(&tell, capsule.get());
  });
}

inline PyObject* as_list(const std::vector<VersionRef>& versions) {
  Ref list = checked(PyList_New(static_cast<Py_ssize_t>(versions.size())));
  for (size_t i = 0; i < versions.size(); i++) PyList_SET_ITEM(list.get(), i, as_object(versions[i].get()).release());
  return list.release();
}

template <void (Ledger::*function)(Version*)>
PyObject* of_version(PyObject* self, PyObject* version) {
  return done([&] { (core_of(self).ledger.*function)(native_node(version)); });
}

// -- searches of all versions. No Python code runs meanwhile, so the versions do not change -----------------------

inline PyObject* as_list(const VersionList& versions) {
  Ref list = checked(PyList_New(static_cast<Py_ssize_t>(versions.size())));
  for (size_t i = 0; i < versions.size(); i++) PyList_SET_ITEM(list.get(), i, as_object(versions[i]).release());
  return list.release();
}

inline PyObject* walk_weigh(PyObject* self, PyObject*) {
  return guarded([&] {
    Ledger& ledger = core_of(self).ledger;
    Weighed found = weigh(ledger.versions.all(), ledger.backend);
    Ref keys = checked(PySet_New(nullptr));
    for (int64_t one : found.keys)
      if (PySet_Add(keys.get(), checked(PyLong_FromLongLong(one)).get()) < 0) raise();
    return Py_BuildValue("(On)", keys.get(), static_cast<Py_ssize_t>(found.looked_at));
  });
}

inline PyObject* walk_mutated(PyObject* self, PyObject* args) {
  PyObject* trusted;
  long long age;
  if (!PyArg_ParseTuple(args, "LO!", &age, &PyList_Type, &trusted)) return nullptr;
  return guarded([&] {
    std::unordered_set<const Version*> constants;
    for (PyObject* one : Items(trusted)) constants.insert(native_node(one));
    Ledger& ledger = core_of(self).ledger;
    return as_list(mutated(ledger.versions.all(), ledger.backend, age, constants));
  });
}

// Returns None without a host tier.
inline PyObject* host_figures(PyObject* self, void*) {
  const HostTier* tier = core_of(self).ledger.tier.get();
  if (tier == nullptr) return Ref::copy(Py_None).release();
  return Py_BuildValue("{sLsLsLsLsLsLsLsLsLsLsO}", "most_bytes", static_cast<long long>(tier->most_bytes), "bytes",
                       static_cast<long long>(tier->nbytes), "peak_bytes", static_cast<long long>(tier->peak_bytes), "copies_out",
                       static_cast<long long>(tier->out().copies), "bytes_out", static_cast<long long>(tier->out().nbytes),
                       "ahead_out", static_cast<long long>(tier->out().ahead), "copies_in",
                       static_cast<long long>(tier->in().copies), "bytes_in", static_cast<long long>(tier->in().nbytes),
                       "ahead_in", static_cast<long long>(tier->in().ahead), "waited_ns",
                       static_cast<long long>(tier->waited_ns()), "overlaps", tier->overlaps ? Py_True : Py_False);
}

inline PyObject* host_costs(PyObject* self, void*) {
  const HostTier* tier = core_of(self).ledger.tier.get();
  if (tier == nullptr) return Ref::copy(Py_None).release();
  return Py_BuildValue("(dd)", tier->out().ns_per_byte, tier->in().ns_per_byte);
}

inline PyTypeObject* make_ledger_type(const std::string& module) {
  using L = LedgerObject;
  static PyMethodDef methods[] = {
      {"decided",
       [](PyObject* self, PyObject* args) -> PyObject* {
         long long decision, nbytes, age, mutations;
         if (!PyArg_ParseTuple(args, "LLLL", &decision, &nbytes, &age, &mutations)) return nullptr;
         return done([&] { core_of(self).ledger.decided(static_cast<Decision>(decision), nbytes, age, mutations); });
       },
       METH_VARARGS, "decided(decision, nbytes, age, mutations): note a decision about a version with these attributes."},
      {"evictable", of_version<&Ledger::evictable>, METH_O,
       "Add a resident version with a recipe to the policy, if it is large enough."},
      {"enter", of_version<&Ledger::enter>, METH_O, "Count a storage that has memory now."},
      {"keep_copy",
       [](PyObject* self, PyObject* args) -> PyObject* {
         PyObject *version, *storage;
         if (!PyArg_ParseTuple(args, "OO", &version, &storage)) return nullptr;
         return done([&] { core_of(self).ledger.keep_copy(native_node(version), as_storage(storage)); });
       },
       METH_VARARGS,
       "keep_copy(version, storage): a copy of a constant that is about to change, as long as some recipe reads this version."},
      {"forget_host_copy",
       [](PyObject*, PyObject* version) -> PyObject* { return done([&] { Ledger::forget_host_copy(native_node(version)); }); },
       METH_O, "A version is about to be written to, or to change its size: drop its copy on the host."},
      {"let_constants_leave",
       [](PyObject* self, PyObject*) -> PyObject* { return done([&] { core_of(self).ledger.let_constants_leave(); }); },
       METH_NOARGS, "Let constants leave for the host from now on, instead of once nothing else could make room."},
      {"restored", of_version<&Ledger::restored>, METH_O, "An evicted version of the program has its memory again."},
      {"use_copy", of_version<&Ledger::use_copy>, METH_O,
       "Another version has the storage of this one, which has its copy instead, if there is one."},
      {"begin_pressure",
       [](PyObject* self, PyObject*) -> PyObject* { return done([&] { core_of(self).eviction.begin_pressure(); }); }, METH_NOARGS,
       "Memory runs short for the first time: report everything so far to the policy."},
      {"known",
       [](PyObject* self, PyObject*) -> PyObject* { return guarded([&] { return as_list(core_of(self).ledger.known()); }); },
       METH_NOARGS, "All versions: those with memory, or whose memory is evicted, and what they are made from."},
      {"note_peak",
       [](PyObject* self, PyObject* nbytes) -> PyObject* {
         return done([&] { core_of(self).ledger.note_peak(as_number(nbytes)); });
       },
       METH_O, "Update the peak with the bytes in memory at this moment."},
      {"collect_dead", [](PyObject* self, PyObject*) -> PyObject* { return done([&] { core_of(self).ledger.collect_dead(); }); },
       METH_NOARGS, "Account for the storages that died since the last call."},
      {"reserve",
       [](PyObject* self, PyObject* args) -> PyObject* {
         long long call, nbytes;
         if (!PyArg_ParseTuple(args, "LL", &call, &nbytes)) return nullptr;
         return done([&] { core_of(self).ledger.reserve(call, PyThread_get_thread_ident(), nbytes); });
       },
       METH_VARARGS, "reserve(call, nbytes): reserve room for an operator in progress in this thread, by the id of its call."},
      {"give_back",
       [](PyObject* self, PyObject* call) { return PyBool_FromLong(core_of(self).ledger.give_back(as_number(call))); }, METH_O,
       "give_back(call): give back what a call has reserved. Returns whether it had reserved anything."},
      {"others_reserve",
       [](PyObject* self, PyObject*) {
         return PyBool_FromLong(core_of(self).ledger.any_reserved_by_others(PyThread_get_thread_ident()));
       },
       METH_NOARGS, "Return whether operators of other threads are in progress."},
      {"largest_copy",
       [](PyObject* self, PyObject*) -> PyObject* {
         const Ledger& ledger = core_of(self).ledger;
         return guarded([&] { return PyLong_FromLongLong(largest_copy(ledger.versions.all(), ledger.backend)); });
       },
       METH_NOARGS, "The bytes that a copy of a constant may take."},
      {"use",
       [](PyObject* self, PyObject* device) -> PyObject* {
         return guarded([&] {
           Ledger& ledger = core_of(self).ledger;
           int64_t before = ledger.device, wanted = as_number(device);
           if (wanted < 0 || wanted > UINT8_MAX) throw std::out_of_range("no such device");
           ledger.use(wanted);
           return PyLong_FromLongLong(before);
         });
       },
       METH_O, "Use a device from now on: the figures are those of its tensors. Returns the one that was in use."},
      {"take_away", of_version<&Ledger::take_away>, METH_O,
       "Note that the program takes a constant away, and will bring it back."},
      {"weigh", walk_weigh, METH_NOARGS, "The keys of the constants worth a copy, and how many versions have been looked at."},
      {"carried",
       [](PyObject* self, PyObject* cut_age) -> PyObject* {
         const Ledger& ledger = core_of(self).ledger;
         return guarded([&] { return as_list(carried(ledger.versions.all(), ledger.backend, as_number(cut_age))); });
       },
       METH_O,
       "carried(cut_age): the versions that would be recomputed from released storages older than that, the youngest first."},
      {"mutated", walk_mutated, METH_VARARGS,
       "mutated(age, trusted): the versions in memory, since `age`, whose recipes have lost an input, the youngest first."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyMemberDef members[] = {
      {"heap", T_OBJECT, offsetof(L, heap), 0, nullptr},
      {"fingerprints", T_OBJECT, offsetof(L, fingerprints), 0, nullptr},
      {"outside", T_OBJECT, offsetof(L, outside), 0, nullptr},
      {"observers", T_OBJECT, offsetof(L, observers), 0, nullptr},
      {"decision_observers", T_OBJECT, offsetof(L, decision_observers), 0, nullptr},
      {"dtr", T_OBJECT, offsetof(L, dtr), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
#define DTRRUN_FIGURE(name)                                                       \
  {                                                                               \
    #name, get_figure<&Ledger::name>, set_figure<&Ledger::name>, nullptr, nullptr \
  }
  static PyGetSetDef computed[] = {
      DTRRUN_FIGURE(age),
      DTRRUN_FIGURE(clock),
      DTRRUN_FIGURE(step_age),
      DTRRUN_FIGURE(step_began),
      DTRRUN_FIGURE(step_work),
      DTRRUN_FIGURE(resident_bytes),
      DTRRUN_FIGURE(census_bytes),
      DTRRUN_FIGURE(evicted_bytes),
      DTRRUN_FIGURE(scratch_bytes),
      DTRRUN_FIGURE(copied_bytes),
      DTRRUN_FIGURE(brought_bytes),
      DTRRUN_FIGURE(peak_bytes),
      DTRRUN_FIGURE(step_peak_bytes),
      DTRRUN_FIGURE(plain_peak_bytes),
      DTRRUN_FIGURE(freed_bytes),
      DTRRUN_FIGURE(recomputed_ns),
      DTRRUN_FIGURE(recomputed_cost),
      DTRRUN_FIGURE(collection_due_ns),
      DTRRUN_FIGURE(paused),
      DTRRUN_FIGURE(operators_counted),
      DTRRUN_FIGURE(least_bytes),
      DTRRUN_FIGURE(least_copy_bytes),
      {"reserved_bytes", get_figure<&Ledger::reserved_bytes>, nullptr, nullptr, nullptr},
      {"device", get_figure<&Ledger::device>, nullptr, nullptr, nullptr},
      {"devices", [](PyObject* self, void*) { return PyLong_FromLongLong(core_of(self).ledger.devices()); }, nullptr, nullptr,
       nullptr},
      {"left_bytes", get_figure<&Ledger::left_bytes>, nullptr, nullptr, nullptr},
      {"results_leave",
       [](PyObject* self, void*) { return PyLong_FromLongLong(static_cast<int64_t>(core_of(self).ledger.results_leave)); },
       [](PyObject* self, PyObject* value, void*) {
         core_of(self).ledger.results_leave = static_cast<ResultsLeave>(as_number(value));
         return PyErr_Occurred() ? -1 : 0;
       },
       nullptr, nullptr},
      {"left_peak_bytes", get_figure<&Ledger::left_peak_bytes>, nullptr, nullptr, nullptr},
      {"decisions", get_figure<&Ledger::decisions>, nullptr, nullptr, nullptr},
      {"digest", [](PyObject* self, void*) { return PyLong_FromUnsignedLongLong(core_of(self).ledger.digest); }, nullptr, nullptr,
       nullptr},
      {"limit", get_figure<&Ledger::limit>,
       [](PyObject* self, PyObject* value, void*) {
         int64_t nbytes;
         if (!read_number(value, nbytes)) return -1;
         core_of(self).ledger.set_limit(nbytes);
         return 0;
       },
       nullptr, nullptr},
      {"live_storages",
       [](PyObject* self, void*) {
         const Ledger& ledger = core_of(self).ledger;
         int64_t alive = ledger.census == nullptr ? 0 : ledger.census->alive.load();
         return PyLong_FromLongLong(std::max<int64_t>(alive, static_cast<int64_t>(ledger.versions.size())));
       },
       nullptr, nullptr, nullptr},
      {"counting", [](PyObject* self, void*) { return PyBool_FromLong(core_of(self).ledger.counting()); }, nullptr, nullptr,
       nullptr},
      {"pressure", [](PyObject* self, void*) { return PyBool_FromLong(core_of(self).ledger.pressure); },
       [](PyObject* self, PyObject* value, void*) {
         core_of(self).ledger.pressure = value != nullptr && PyObject_IsTrue(value) == 1;
         return 0;
       },
       nullptr, nullptr},
      {"budget_bytes",
       [](PyObject* self, void*) -> PyObject* {
         int64_t found = core_of(self).ledger.budget_bytes;
         return found < 0 ? Ref::copy(Py_None).release() : PyLong_FromLongLong(found);
       },
       [](PyObject* self, PyObject* value, void*) {
         int64_t& budget = core_of(self).ledger.budget_bytes;
         if (value != Py_None) return read_number(value, budget) ? 0 : -1;
         budget = -1;
         return 0;
       },
       nullptr, nullptr},
      {"constants_leave", [](PyObject* self, void*) { return PyBool_FromLong(core_of(self).ledger.constants_leave); }, nullptr,
       nullptr, nullptr},
      {"host", host_figures, nullptr, nullptr, nullptr},
      {"host_costs", host_costs, nullptr, nullptr, nullptr},
      {"policy", [](PyObject* self, void*) { return Ref::copy(or_none(as_ledger(self)->policy)).release(); },
       [](PyObject* self, PyObject* value, void*) {
         if (value == nullptr || Py_TYPE(value) != policy_type) {
           PyErr_SetString(PyExc_TypeError, "a ledger's policy is one of its extension's");
           return -1;
         }
         core_of(self).ledger.policy = &policy_of(value);
         Py_XSETREF(as_ledger(self)->policy, Ref::copy(value).release());
         return 0;
       },
       nullptr, nullptr},
      {"dead", [](PyObject* self, void*) { return PyBool_FromLong(core_of(self).ledger.some_died()); }, nullptr, nullptr,
       nullptr},
      {"on_death", make_on_death, nullptr, nullptr, nullptr},
      {"scratch", [](PyObject* self, void*) { return guarded([&] { return as_list(core_of(self).ledger.scratch.all()); }); },
       nullptr, nullptr, nullptr},
      {"versions",
       [](PyObject* self, void*) -> PyObject* {
         PyObject* made = versions_type->tp_alloc(versions_type, 0);
         if (made != nullptr) reinterpret_cast<VersionsObject*>(made)->ledger = Ref::copy(self).release();
         return made;
       },
       nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
#undef DTRRUN_FIGURE
  auto create = [](PyTypeObject* type, PyObject*, PyObject*) -> PyObject* {
    return guarded([&]() -> PyObject* {
      Ref self = checked(type->tp_alloc(type, 0));
      L* one = as_ledger(self.get());
      one->observers = checked(PyList_New(0)).release();
      one->decision_observers = checked(PyList_New(0)).release();
      one->core = make_core(self.get()).release();
      return self.release();
    });
  };
  return Base<L, &L::policy, &L::heap, &L::fingerprints, &L::outside, &L::observers, &L::decision_observers, &L::dtr>::make(
      module + ".Ledger", create, members, methods, computed, "See `core.ledger.Ledger`.");
}

}  // namespace dtrrun
