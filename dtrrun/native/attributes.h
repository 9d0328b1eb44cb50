// Attributes of Python's objects.
#pragma once

#include "python.h"

namespace dtrrun {

inline Ref attribute(PyObject* object, const char* name) { return checked(PyObject_GetAttrString(object, name)); }

inline bool truth(PyObject* object, const char* name) {
  Ref found = attribute(object, name);
  int is_true = PyObject_IsTrue(found.get());
  if (is_true < 0) raise();
  return is_true;
}

inline int64_t attribute_number(PyObject* object, const char* name) { return as_number(attribute(object, name).get()); }

inline PyObject* type_of(PyObject* classes, const char* name) { return PyDict_GetItemString(classes, name); }

}  // namespace dtrrun
