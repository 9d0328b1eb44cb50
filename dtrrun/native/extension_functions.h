// Intercepts functions of native extensions that Python calls directly: they are not operators, so they do not arrive.
//
// Each is a built-in function object of Python's, with a pointer to the C function. The pointer is replaced, in the same object,
// so it does not matter where the program keeps references to it. A second object, the twin, calls the original C function.
#pragma once

#include <unordered_map>

#include "bodies.h"
#include "callers.h"
#include "python.h"
#include "way_in.h"

namespace dtrrun {

class ExtensionFunctions {
 public:
  // From now on, such functions call `call(twin, args, kwargs)` where a session sees operators. None: they
  // behave as before. The twins stay for the next session.
  static void watch(PyObject* call) { Py_XDECREF(std::exchange(call_, call == Py_None ? nullptr : Ref::copy(call).release())); }

  // Intercepts those of these objects that are such functions.
  static void meet(PyObject* functions) {
    for (PyObject* one : Items(functions)) {
      if (!PyCFunction_CheckExact(one) || twins_.count(one) != 0) continue;
      if (ForeignCode::own().has(reinterpret_cast<uintptr_t>(PyCFunction_GET_FUNCTION(one)))) exchange(one);
    }
  }

 private:
  static void exchange(PyObject* one) {
    auto* function = reinterpret_cast<PyCFunctionObject*>(one);
    Ref twin = checked(PyCFunction_NewEx(function->m_ml, function->m_self, function->m_module));
    // For other kinds of functions, Python ignores the pointer.
    constexpr int ANY_ARGUMENTS = METH_VARARGS | METH_KEYWORDS;
    if ((function->m_ml->ml_flags & METH_VARARGS) == 0) {
      auto* described = new PyMethodDef(*function->m_ml);  // lives as long as the function, which is never freed
      described->ml_flags = (described->ml_flags & ~(METH_FASTCALL | METH_O | METH_NOARGS)) | ANY_ARGUMENTS;
      function->m_ml = described;
    }
    function->vectorcall = &called;
    Py_INCREF(one);
    twins_.emplace(one, twin.release());
  }

  static PyObject* called(PyObject* self, PyObject* const* given, size_t count, PyObject* names) {
    PyObject* twin = twins_.at(self);
    bool is_watched = Body::innermost != nullptr;  // the operator that calls it is watched as a whole
    if (call_ == nullptr || is_watched || !Off::none() || !is_switched_on() || is_hidden())
      return PyObject_Vectorcall(twin, given, count, names);
    return guarded([&]() -> PyObject* {
      Py_ssize_t places = PyVectorcall_NARGS(count);
      Ref args = checked(PyTuple_New(places)), kwargs = checked(PyDict_New()), call = Ref::copy(call_);
      for (Py_ssize_t i = 0; i < places; i++) PyTuple_SET_ITEM(args.get(), i, Ref::copy(given[i]).release());
      for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); i++)
        if (PyDict_SetItem(kwargs.get(), PyTuple_GET_ITEM(names, i), given[places + i]) < 0) raise();
      PyObject* all[] = {twin, args.get(), kwargs.get()};
      return PyObject_Vectorcall(call.get(), all, 3, nullptr);
    });
  }

  static inline PyObject* call_ = nullptr;
  static inline std::unordered_map<PyObject*, PyObject*>& twins_ = *new std::unordered_map<PyObject*, PyObject*>;  // owned
};

}  // namespace dtrrun
