// Attributes of Python's objects, and the slots of `core.graph.Signature`.
#pragma once

#include "python.h"

namespace dtrrun {

constexpr int SETTLED = 8;  // core.graph.Signature.SETTLED

inline Ref attribute(PyObject* object, const char* name) { return checked(PyObject_GetAttrString(object, name)); }

inline bool truth(PyObject* object, const char* name) {
  Ref found = attribute(object, name);
  int is_true = PyObject_IsTrue(found.get());
  if (is_true < 0) raise();
  return is_true;
}

inline int64_t attribute_number(PyObject* object, const char* name) { return as_number(attribute(object, name).get()); }

inline PyObject* type_of(PyObject* classes, const char* name) { return PyDict_GetItemString(classes, name); }

struct SignatureSlots {
  Slot calls, cost, guessed, operator_, output_bytes, replayed_as, workspace;
  explicit SignatureSlots(PyObject* cls)
      : calls(cls, "calls"), cost(cls, "cost"), guessed(cls, "guessed"), operator_(cls, "operator"), output_bytes(cls, "output_bytes"),
        replayed_as(cls, "replayed_as"), workspace(cls, "workspace") {}
};

}  // namespace dtrrun
