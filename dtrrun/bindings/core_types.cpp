#include "core_types.h"

#include "parts.h"

namespace dtrrun {

void add_core_types(py::module_& module, const std::string& name, const VersionType& versions) {
  nothing = PyTuple_New(0);
  version_type = make_version_type(name, versions);
  operation_type = make_operation_type(name);
  signature_type = make_signature_type(name);
  if (nothing == nullptr) raise();
  for (PyTypeObject* type : {version_type, operation_type, signature_type})
    if (type == nullptr || PyModule_AddType(module.ptr(), type) < 0) raise();
  bind_policy(module);
  bind_ledger(module);
  bind_parts(module);
  module.attr("CHAIN_LIMIT") = Mutation::CHAIN_LIMIT;
}

}  // namespace dtrrun
