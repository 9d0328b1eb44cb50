// The figures of `core.ledger.Ledger`: a base class that keeps numbers as numbers (`dispatch/native.py`).
#pragma once

#include "graph.h"

namespace dtrrun {

struct CountersObject {
  PyObject_HEAD
  int64_t age, clock, evicted_bytes, freed_bytes, least_bytes, limit, peak_bytes, resident_bytes, scratch_bytes, step_age,
      step_peak_bytes;
  bool pressure;
  PyObject *budget_bytes, *dead, *heap, *policy, *versions;
};

struct CounterFields {
  using C = CountersObject;
  Number<C, &C::age> age;
  Number<C, &C::clock> clock;
  Number<C, &C::evicted_bytes> evicted_bytes;
  Number<C, &C::freed_bytes> freed_bytes;
  Number<C, &C::least_bytes> least_bytes;
  Number<C, &C::limit> limit;
  Number<C, &C::peak_bytes> peak_bytes;
  Number<C, &C::resident_bytes> resident_bytes;
  Number<C, &C::scratch_bytes> scratch_bytes;
  Number<C, &C::step_age> step_age;
  Number<C, &C::step_peak_bytes> step_peak_bytes;
  Flag<C, &C::pressure> pressure;
  Link<C, &C::budget_bytes> budget_bytes;
  Link<C, &C::dead> dead;
  Link<C, &C::heap> heap;
  Link<C, &C::policy> policy;
  Link<C, &C::versions> versions;
};

inline PyTypeObject* make_counters_type() {
  using C = CountersObject;
  static PyMemberDef members[] = {
      {"age", T_LONGLONG, offsetof(C, age), 0, nullptr},
      {"clock", T_LONGLONG, offsetof(C, clock), 0, nullptr},
      {"evicted_bytes", T_LONGLONG, offsetof(C, evicted_bytes), 0, nullptr},
      {"freed_bytes", T_LONGLONG, offsetof(C, freed_bytes), 0, nullptr},
      {"least_bytes", T_LONGLONG, offsetof(C, least_bytes), 0, nullptr},
      {"limit", T_LONGLONG, offsetof(C, limit), 0, nullptr},
      {"peak_bytes", T_LONGLONG, offsetof(C, peak_bytes), 0, nullptr},
      {"resident_bytes", T_LONGLONG, offsetof(C, resident_bytes), 0, nullptr},
      {"scratch_bytes", T_LONGLONG, offsetof(C, scratch_bytes), 0, nullptr},
      {"step_age", T_LONGLONG, offsetof(C, step_age), 0, nullptr},
      {"step_peak_bytes", T_LONGLONG, offsetof(C, step_peak_bytes), 0, nullptr},
      {"pressure", T_BOOL, offsetof(C, pressure), 0, nullptr},
      {"budget_bytes", T_OBJECT, offsetof(C, budget_bytes), 0, nullptr},
      {"dead", T_OBJECT, offsetof(C, dead), 0, nullptr},
      {"heap", T_OBJECT, offsetof(C, heap), 0, nullptr},
      {"policy", T_OBJECT, offsetof(C, policy), 0, nullptr},
      {"versions", T_OBJECT, offsetof(C, versions), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  auto traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
    auto* one = reinterpret_cast<C*>(self);
    for (PyObject* link : {one->budget_bytes, one->dead, one->heap, one->policy, one->versions}) Py_VISIT(link);
    Py_VISIT(Py_TYPE(self));
    return 0;
  };
  auto clear = [](PyObject* self) -> int {
    auto* one = reinterpret_cast<C*>(self);
    for (PyObject** link : {&one->budget_bytes, &one->dead, &one->heap, &one->policy, &one->versions}) Py_CLEAR(*link);
    return 0;
  };
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    type->tp_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
  };
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
      {Py_tp_traverse, reinterpret_cast<void*>(+traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(+clear)},
      {Py_tp_members, members},
      {Py_tp_doc, const_cast<char*>("The figures of a `core.ledger.Ledger`.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"_dtrrun_native.Counters", sizeof(C), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun
