// The classes of a core for Python: nodes, policies, and the parts.
#pragma once

#include "ledger.h"

namespace dtrrun {

// Makes them and adds them to an extension of this name. versions: the extension's own kind.
void add_core_types(py::module_& module, const std::string& name, const VersionType& versions);

}  // namespace dtrrun
