// Functions for Python: code that is not PyTorch's, and what of PyTorch and Python is replaced for its sake.
#include "dlpack.h"
#include "dynamo_guards.h"
#include "entries.h"
#include "extension_functions.h"
#include "faults.h"
#include "functions.h"
#include "registrations.h"

namespace dtrrun {

void watch_faults() { Faults::watch(&bring_back); }
void unwatch_faults() { Faults::unwatch(); }

namespace {

std::vector<py::object> foreign_paths() {
  std::vector<py::object> paths;
  for (const std::string& path : ForeignCode::own().paths())
    paths.push_back(object_in(checked(PyUnicode_DecodeFSDefault(path.c_str()))));
  return paths;
}

// By hand: it takes part in calls of the program, which pass on any arguments.
PyMethodDef entry_functions[] = {
    {"entry", Entries::make, METH_VARARGS,
     "entry(make, original, hide, skips): return what to call in place of `original`, which calls make(original) such that\n"
     "the original sees none of our frames. hide: called with the errors that leave it, or None. skips: the caller's frame\n"
     "is ours."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_foreign(py::module_& module) {
  if (!Entries::add_types() || PyModule_AddType(module.ptr(), Entries::entry_type) < 0) raise();
  if (PyModule_AddFunctions(module.ptr(), entry_functions) < 0) raise();
  module.def(
      "watch_faults",
      [] {
        if (is_session_open()) watch_faults();
      },
      "Make sure that our fault handler is still the first.");
  module.def("knows_storages", &OwnStorages::are_known,
             "Return whether PyTorch's storages have the virtual functions that we replace.");
  module.def(
      "move", [](std::string name) { moved = std::move(name); },
      "For tests: act as if this function were not at its place in PyTorch's tables.");
  module.def("faults", &Faults::count,
             "Return how often code other than operators has touched an evicted storage in this process.");
  module.def(
      "watch_registrations", [](py::handle callback) { Registrations::watch(callback.ptr()); },
      "Call a function with the names of the operators that exist, and of those registered later; None: stop.");
  module.def(
      "watch_functions", [](py::handle call) { ExtensionFunctions::watch(call.ptr()); },
      "Call `call(function, args, kwargs)` instead of functions of extensions that use PyTorch; None: stop.");
  module.def(
      "meet_functions",
      [](py::handle functions) {
        ExtensionFunctions::meet(checked(PySequence_Fast(functions.ptr(), "functions must be a sequence")).get());
      },
      "Watch those of these functions whose code is such an extension's.");
  module.def("foreign_paths", &foreign_paths, "Return the paths of the libraries that use PyTorch and are not part of it.");
  module.def(
      "guard_exports",
      [](py::handle capsule, py::handle reach) { return object_in(checked(Exports::guard(capsule.ptr(), reach.ptr()))); },
      "Let DLPack's table call reach(tensor) before it exports a tensor; None: stop. Returns False, and does nothing, if the\n"
      "table is not as we know it.");
  module.def("hide_from_guards", &DynamoGuards::watch,
             "Hide our key from Dynamo's guards while they are checked, or stop doing so.");
}

}  // namespace dtrrun
