// The slots of dtrrun/core's classes that C++ reads and writes.
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

struct VersionSlots {
  Slot age, bound, component, cost, dependents, escaped, extent, fingerprint, key, last_access, locks, mutations,
      nbytes, needed_by, neighbourhood, operation, pin, resident, scratch, block, superseded, used, uses;
  explicit VersionSlots(PyObject* cls)
      : age(cls, "age"), bound(cls, "bound"), component(cls, "component"), cost(cls, "cost"),
        dependents(cls, "dependents"), escaped(cls, "escaped"), extent(cls, "extent"),
        fingerprint(cls, "fingerprint"), key(cls, "key"), last_access(cls, "last_access"), locks(cls, "locks"),
        mutations(cls, "mutations"), nbytes(cls, "nbytes"), needed_by(cls, "needed_by"),
        neighbourhood(cls, "neighbourhood"), operation(cls, "operation"), pin(cls, "pin"),
        resident(cls, "resident"), scratch(cls, "scratch"), block(cls, "block"), superseded(cls, "superseded"),
        used(cls, "used"), uses(cls, "uses") {}
};

struct OperationSlots {
  Slot constants, inputs, kept_inputs, outputs, recorded, secured, signature, tensors;
  explicit OperationSlots(PyObject* cls)
      : constants(cls, "constants"), inputs(cls, "inputs"), kept_inputs(cls, "kept_inputs"),
        outputs(cls, "outputs"), recorded(cls, "recorded"), secured(cls, "secured"),
        signature(cls, "signature"), tensors(cls, "tensors") {}
};

struct SignatureSlots {
  Slot calls, cost, guessed, operator_, output_bytes, replayed_as, workspace;
  explicit SignatureSlots(PyObject* cls)
      : calls(cls, "calls"), cost(cls, "cost"), guessed(cls, "guessed"), operator_(cls, "operator"), output_bytes(cls, "output_bytes"),
        replayed_as(cls, "replayed_as"), workspace(cls, "workspace") {}
};

struct LedgerSlots {
  Slot age, budget_bytes, clock, dead, evicted_bytes, freed_bytes, heap, least_bytes, limit, on_death, peak_bytes,
      policy, pressure, resident_bytes, scratch_bytes, step_age, step_peak_bytes, versions;
  explicit LedgerSlots(PyObject* cls)
      : age(cls, "age"), budget_bytes(cls, "budget_bytes"), clock(cls, "clock"), dead(cls, "dead"),
        evicted_bytes(cls, "evicted_bytes"), freed_bytes(cls, "freed_bytes"), heap(cls, "heap"),
        least_bytes(cls, "least_bytes"), limit(cls, "limit"), on_death(cls, "on_death"),
        peak_bytes(cls, "peak_bytes"), policy(cls, "policy"), pressure(cls, "pressure"), resident_bytes(cls, "resident_bytes"),
        scratch_bytes(cls, "scratch_bytes"), step_age(cls, "step_age"), step_peak_bytes(cls, "step_peak_bytes"),
        versions(cls, "versions") {}
};

}  // namespace dtrrun
