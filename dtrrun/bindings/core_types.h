// The classes of a core for Python: nodes, policies, and the parts.
#pragma once

#include "ledger.h"

namespace dtrrun {

// Makes them and adds them to an extension. versions: the extension's own kind. Returns false, with an error set, if that fails.
bool add_core_types(PyObject* extension, const std::string& module, const VersionType& versions);

}  // namespace dtrrun
