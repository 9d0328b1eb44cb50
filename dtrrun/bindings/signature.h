// The base class of `core.graph.Signature`, which stores the figures as C++ numbers.
//
// By hand, like nodes: an operation refers to the figures in the Python object, and a session makes one for each new kind of call
// without running Python.
#pragma once

#include "nodes.h"

namespace dtrrun {

inline PyTypeObject* make_signature_type(const std::string& module) {
  using S = SignatureObject;
  constexpr Py_ssize_t FIGURES = offsetof(S, figures);
  static PyMethodDef methods[] = {
      {"learn_bytes",
       [](PyObject* self, PyObject* args) -> PyObject* {
         long long nbytes;
         int opaque, varies, measured;
         if (!PyArg_ParseTuple(args, "Lppp", &nbytes, &opaque, &varies, &measured)) return nullptr;
         as_signature(self)->figures.learn_bytes(nbytes, opaque != 0, varies != 0, measured != 0);
         Py_RETURN_NONE;
       },
       METH_VARARGS, "learn_bytes(nbytes, opaque, varies, measured): see `core/version.h`."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyMemberDef members[] = {
      {"calls", T_LONGLONG, FIGURES + offsetof(Signature, calls), 0, nullptr},
      {"cost", T_LONGLONG, FIGURES + offsetof(Signature, cost), 0, nullptr},
      {"output_bytes", T_LONGLONG, FIGURES + offsetof(Signature, output_bytes), 0, nullptr},
      {"workspace", T_LONGLONG, FIGURES + offsetof(Signature, workspace), 0, nullptr},
      {"guessed", T_BOOL, FIGURES + offsetof(Signature, guessed), 0, nullptr},
      {"timed", T_BOOL, FIGURES + offsetof(Signature, timed), 0, nullptr},
      {"geometries", T_OBJECT, offsetof(S, geometries), 0, nullptr},
      {"operator", T_OBJECT, offsetof(S, operator_), 0, nullptr},
      {"replayed_as", T_OBJECT, offsetof(S, replayed_as), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  auto create = [](PyTypeObject* type, PyObject*, PyObject*) { return type->tp_alloc(type, 0); };  // all zeros
  auto traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
    for (PyObject* link : {as_signature(self)->geometries, as_signature(self)->operator_, as_signature(self)->replayed_as})
      Py_VISIT(link);
    Py_VISIT(Py_TYPE(self));
    return 0;
  };
  static constexpr auto clear = [](PyObject* self) -> int {
    Py_CLEAR(as_signature(self)->geometries);
    Py_CLEAR(as_signature(self)->operator_);
    Py_CLEAR(as_signature(self)->replayed_as);
    return 0;
  };
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(+create)},
      {Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
      {Py_tp_traverse, reinterpret_cast<void*>(+traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(+clear)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  static std::string name = module + ".SignatureFigures";
  PyType_Spec spec = {name.c_str(), sizeof(S), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun
