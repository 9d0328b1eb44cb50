#include "core_types.h"

#include "operators.h"

namespace dtrrun {

bool add_core_types(PyObject* extension, const std::string& module, const VersionType& versions) {
  nothing = PyTuple_New(0);
  version_type = make_version_type(module, versions);
  operation_type = make_operation_type(module);
  policy_type = make_policy_type(module);
  signature_type = make_signature_type(module);
  versions_type = make_versions_type(module);
  ledger_type = make_ledger_type(module);
  if (nothing == nullptr || signature_type == nullptr || versions_type == nullptr || ledger_type == nullptr) return false;
  for (PyTypeObject* type : {version_type, operation_type, policy_type, signature_type, ledger_type, make_recipes_type(module),
                             make_deallocation_type(module), make_eviction_type(module), make_rematerializer_type(module),
                             make_mutation_type(module), make_operators_type(module)})
    if (type == nullptr || PyModule_AddType(extension, type) < 0) return false;
  return PyModule_AddIntConstant(extension, "CHAIN_LIMIT", Mutation::CHAIN_LIMIT) == 0;
}

}  // namespace dtrrun
