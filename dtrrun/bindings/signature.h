// The base class of `core.graph.Signature`, which stores the figures as C++ numbers.
#pragma once

#include "base.h"
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
         return done([&] { as_signature(self)->figures.learn_bytes(nbytes, opaque != 0, varies != 0, measured != 0); });
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
  return Base<S, &S::geometries, &S::operator_, &S::replayed_as>::make(module + ".SignatureFigures", new_zeros, members, methods,
                                                                       nothing_computed, nullptr);
}

}  // namespace dtrrun
