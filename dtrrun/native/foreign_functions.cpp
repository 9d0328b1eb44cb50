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

bool add_entry_types(PyObject* extension) {
  return Entries::add_types() && PyModule_AddType(extension, Entries::entry_type) == 0;
}

namespace {

PyObject* keep_watching_faults(PyObject*, PyObject*) {
  if (is_session_open()) watch_faults();
  Py_RETURN_NONE;
}

PyObject* faults(PyObject*, PyObject*) { return PyLong_FromLongLong(Faults::count()); }

PyObject* watch_registrations(PyObject*, PyObject* callback) {
  return guarded([&]() -> PyObject* {
    Registrations::watch(callback);
    Py_RETURN_NONE;
  });
}

PyObject* watch_functions(PyObject*, PyObject* call) {
  ExtensionFunctions::watch(call);
  Py_RETURN_NONE;
}

PyObject* meet_functions(PyObject*, PyObject* functions) {
  return guarded([&]() -> PyObject* {
    ExtensionFunctions::meet(checked(PySequence_Fast(functions, "functions must be a sequence")).get());
    Py_RETURN_NONE;
  });
}

PyObject* foreign_paths(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    Ref paths = checked(PyList_New(0));
    for (const std::string& path : ForeignCode::own().paths())
      if (PyList_Append(paths.get(), checked(PyUnicode_DecodeFSDefault(path.c_str())).get()) < 0) raise();
    return paths.release();
  });
}

PyObject* guard_exports(PyObject*, PyObject* args) {
  PyObject *capsule, *reach;
  if (!PyArg_ParseTuple(args, "OO", &capsule, &reach)) return nullptr;
  return guarded([&] { return Exports::guard(capsule, reach); });
}

PyObject* hide_from_guards(PyObject*, PyObject* on) {
  return guarded([&]() -> PyObject* {
    DynamoGuards::watch(PyObject_IsTrue(on));
    Py_RETURN_NONE;
  });
}

}  // namespace

PyMethodDef foreign_functions[] = {
    {"watch_faults", keep_watching_faults, METH_NOARGS, "Make sure that our fault handler is still the first."},
    {"faults", faults, METH_NOARGS, "Return how often code other than operators has touched an evicted storage in this process."},
    {"watch_registrations", watch_registrations, METH_O,
     "Call a function with the names of the operators that exist, and of those registered later; None: stop."},
    {"watch_functions", watch_functions, METH_O,
     "watch_functions(call): call `call(function, args, kwargs)` instead of functions of extensions that use PyTorch;\n"
     "None: stop."},
    {"meet_functions", meet_functions, METH_O, "Watch those of these functions whose code is such an extension's."},
    {"foreign_paths", foreign_paths, METH_NOARGS, "Return the paths of the libraries that use PyTorch and are not part of it."},
    {"guard_exports", guard_exports, METH_VARARGS,
     "guard_exports(capsule, reach): let DLPack's table call reach(tensor) before it exports a tensor; None: stop. Returns False,\n"
     "and does nothing, if the table is not as we know it."},
    {"hide_from_guards", hide_from_guards, METH_O, "Hide our key from Dynamo's guards while they are checked, or stop doing so."},
    {"entry", Entries::make, METH_VARARGS,
     "entry(make, original, hide, skips): return what to call in place of `original`, which calls make(original) such that\n"
     "the original sees none of our frames. hide: called with the errors that leave it, or None. skips: the caller's frame\n"
     "is ours."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace dtrrun
