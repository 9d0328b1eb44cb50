// The figures of `core.ledger.Ledger` and `core.graph.Signature`: base classes that keep numbers as numbers. Python's own
// classes, which bring everything else, are derived from them in `dispatch/native.py`.
#pragma once

#include "../bindings/policy.h"
#include "graph.h"

namespace dtrrun {

// What the type of a base class with such links needs.
template <class Object, PyObject* Object::*... links>
struct Base {
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    for (PyObject* link : {reinterpret_cast<Object*>(self)->*links...}) Py_VISIT(link);
    Py_VISIT(Py_TYPE(self));
    return 0;
  }
  static int clear(PyObject* self) {
    for (PyObject** link : {&(reinterpret_cast<Object*>(self)->*links)...}) Py_CLEAR(*link);
    return 0;
  }
  static void destroy(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
  }
  static PyTypeObject* make(const char* name, PyMemberDef* members, PyMethodDef* methods, PyGetSetDef* computed) {
    PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
        {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
        {Py_tp_clear, reinterpret_cast<void*>(clear)},
        {Py_tp_members, members},
        {Py_tp_methods, methods},
        {Py_tp_getset, computed},
        {0, nullptr},
    };
    PyType_Spec spec = {name, sizeof(Object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
};

// -- of a ledger -----------------------------------------------------------------------------------------------

struct CountersObject {
  PyObject_HEAD
  int64_t age, clock, evicted_bytes, freed_bytes, least_bytes, limit, peak_bytes, resident_bytes, scratch_bytes, step_age,
      step_peak_bytes;
  int64_t decisions;
  uint64_t digest;
  bool pressure;
  PyObject *budget_bytes, *dead, *heap, *policy, *versions;
};

// core.ledger.Decision
enum class Decision : uint64_t { EMPTIED = 1, RESTORED, HELD, DROPPED, COPIED, PINNED, LOST, REFUSED };

// Adds a decision to a ledger's digest: what, when, and about which version. Two runs of a program that decide alike have
// equal digests. So nothing here may depend on addresses or on time.
inline void note_decision(PyObject* ledger, Decision decision, int64_t nbytes, int64_t age, int64_t mutations) {
  auto* of = reinterpret_cast<CountersObject*>(ledger);
  uint64_t what = (static_cast<uint64_t>(of->age) << 4 | static_cast<uint64_t>(decision)) * 0x9E3779B97F4A7C15ull ^
                  static_cast<uint64_t>(age) * 0xC2B2AE3D27D4EB4Full ^
                  (static_cast<uint64_t>(nbytes) + (static_cast<uint64_t>(mutations) << 48)) * 0xFF51AFD7ED558CCDull;
  uint64_t mixed = of->digest ^ what;
  of->digest = (mixed << 29 | mixed >> 35) * 0xC4CEB9FE1A85EC53ull;
  of->decisions++;
}

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
  static PyMethodDef methods[] = {
      {"decided",
       [](PyObject* self, PyObject* args) -> PyObject* {
         long long decision, nbytes, age, mutations;
         if (!PyArg_ParseTuple(args, "LLLL", &decision, &nbytes, &age, &mutations)) return nullptr;
         note_decision(self, static_cast<Decision>(decision), nbytes, age, mutations);
         Py_RETURN_NONE;
       },
       METH_VARARGS, "See `core.ledger.Ledger`."},
      {nullptr, nullptr, 0, nullptr},
  };
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
      {"decisions", T_LONGLONG, offsetof(C, decisions), READONLY, nullptr},
      {"digest", T_ULONGLONG, offsetof(C, digest), READONLY, nullptr},
      {"pressure", T_BOOL, offsetof(C, pressure), 0, nullptr},
      {"budget_bytes", T_OBJECT, offsetof(C, budget_bytes), 0, nullptr},
      {"dead", T_OBJECT, offsetof(C, dead), 0, nullptr},
      {"heap", T_OBJECT, offsetof(C, heap), 0, nullptr},
      {"versions", T_OBJECT, offsetof(C, versions), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef computed[] = {
      {"policy", [](PyObject* self, void*) { return Ref::copy(CounterFields().policy.get(self)).release(); },
       [](PyObject* self, PyObject* value, void*) {
         if (value == nullptr || Py_TYPE(value) != policy_type) {
           PyErr_SetString(PyExc_TypeError, "a session's policy is one of its extension's");
           return -1;
         }
         CounterFields().policy.set(self, value);
         return 0;
       },
       nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  return Base<C, &C::budget_bytes, &C::dead, &C::heap, &C::policy, &C::versions>::make("_dtrrun_native.Counters", members,
                                                                                       methods, computed);
}

// -- of a signature --------------------------------------------------------------------------------------------

constexpr int SETTLED = 8;  // core.graph.Signature.SETTLED

struct SignatureObject {
  PyObject_HEAD
  int64_t calls, cost, output_bytes, workspace;
  bool guessed;
  PyObject *geometries, *operator_, *replayed_as;
};

struct SignatureFields {
  using S = SignatureObject;
  Number<S, &S::calls> calls;
  Number<S, &S::cost> cost;
  Number<S, &S::output_bytes> output_bytes;
  Number<S, &S::workspace> workspace;
  Flag<S, &S::guessed> guessed;
  Link<S, &S::geometries> geometries;
  Link<S, &S::operator_> operator_;
  Link<S, &S::replayed_as> replayed_as;
};

inline PyTypeObject* make_signature_type() {
  using S = SignatureObject;
  static PyMethodDef none[] = {{nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef nothing_computed[] = {{nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMemberDef members[] = {
      {"calls", T_LONGLONG, offsetof(S, calls), 0, nullptr},
      {"cost", T_LONGLONG, offsetof(S, cost), 0, nullptr},
      {"output_bytes", T_LONGLONG, offsetof(S, output_bytes), 0, nullptr},
      {"workspace", T_LONGLONG, offsetof(S, workspace), 0, nullptr},
      {"guessed", T_BOOL, offsetof(S, guessed), 0, nullptr},
      {"geometries", T_OBJECT, offsetof(S, geometries), 0, nullptr},
      {"operator", T_OBJECT, offsetof(S, operator_), 0, nullptr},
      {"replayed_as", T_OBJECT, offsetof(S, replayed_as), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  return Base<S, &S::geometries, &S::operator_, &S::replayed_as>::make("_dtrrun_native.SignatureFigures", members, none, nothing_computed);
}

}  // namespace dtrrun
