// C++ base classes of Python classes.
#pragma once

#include "python.h"

namespace dtrrun {

// The type of a base class whose objects have these links. `Object::end`, if there is one, is called before an object is freed.
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
    if constexpr (requires { Object::end(self); }) Object::end(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
  }
  static PyTypeObject* make(const std::string& name, newfunc create, PyMemberDef* members, PyMethodDef* methods,
                            PyGetSetDef* computed, const char* doc) {
    PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(create)},
        {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
        {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
        {Py_tp_clear, reinterpret_cast<void*>(clear)},
        {Py_tp_members, members},
        {Py_tp_methods, methods},
        {Py_tp_getset, computed},
        {Py_tp_doc, const_cast<char*>(doc)},
        {0, nullptr},
    };
    // The name is not copied before Python 3.12.
    auto& kept = *new std::string(name);
    PyType_Spec spec = {kept.c_str(), sizeof(Object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
};

inline PyGetSetDef nothing_computed[] = {{nullptr, nullptr, nullptr, nullptr, nullptr}};

// Makes an object that is all zeros.
inline PyObject* new_zeros(PyTypeObject* type, PyObject*, PyObject*) { return type->tp_alloc(type, 0); }

// Sets a number from a Python value. Returns false, with an error set, if that is not a number.
inline bool read_number(PyObject* value, int64_t& number) {
  int64_t found = value == nullptr ? -1 : as_number(value);
  if (found == -1 && (value == nullptr || PyErr_Occurred())) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_AttributeError, "it can't be deleted");
    return false;
  }
  number = found;
  return true;
}

// Casts a method that takes arguments by name, for a table of methods.
inline PyCFunction with_keywords(PyCFunctionWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

// Calls `function` for a method that returns nothing, and returns None.
template <class Function>
PyObject* done(const Function& function) {
  return guarded([&]() -> PyObject* {
    function();
    Py_RETURN_NONE;
  });
}

}  // namespace dtrrun
