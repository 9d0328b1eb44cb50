// The core for the simulator, without PyTorch.
#include "replay.h"
#include "walks.h"

namespace dtrrun {

namespace {

// The Python error that is set, as an exception of C++: nothing runs between that and `set_python_error`.
struct PythonError {};

PyObject* new_version(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *storage, *on_death;
  if (!PyArg_ParseTuple(args, "OO", &storage, &on_death)) return nullptr;
  return guarded([&]() -> PyObject* {
    Ref made = allocate<VersionObject>(version_type);
    begin_version(as_version(made.get()));
    watch_death(made.get(), storage, on_death);
    return made.release();
  });
}

void delete_version(PyObject* self) {
  end_version(self);
  deallocate(self);
}

PyObject* referent(PyObject* self, PyObject*, PyObject*) {
  return Ref::copy(PyWeakref_GetObject(as_version(self)->watch)).release();
}

PyObject* living(PyObject*, PyObject*) {
  return Py_BuildValue("(LL)", static_cast<long long>(living_versions), static_cast<long long>(living_operations));
}

PyMethodDef methods[] = {
    DTRRUN_WALKS,
    {"living", living, METH_NOARGS, "(versions, operations) that exist, which the garbage collector does not know."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_dtrrun_core", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

void raise() { throw PythonError(); }

VersionList versions_of_table(PyObject* table) {
  VersionList found;
  PyObject *key, *one;
  for (Py_ssize_t place = 0; PyDict_Next(table, &place, &key, &one);) found.push_back(native_node(one));
  return found;
}

void set_python_error() {
  try {
    throw;
  } catch (const PythonError&) {
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace dtrrun

PyMODINIT_FUNC PyInit__dtrrun_core() {
  using namespace dtrrun;
  nothing = PyTuple_New(0);
  version_type = make_version_type({"_dtrrun_core.Version", sizeof(VersionObject), new_version, delete_version, referent});
  program_has = [](const VersionObject* one) { return PyWeakref_GetObject(one->watch) != Py_None; };
  operation_type = make_operation_type("_dtrrun_core.Operation");
  policy_type = make_policy_type("_dtrrun_core.Policy");
  PyTypeObject* replay_type = make_replay_type("_dtrrun_core.Replay");
  schedule_type = make_schedule_type("_dtrrun_core.Schedule");
  Ref made(PyModule_Create(&module));
  if (!made) return nullptr;
  for (PyTypeObject* type : {version_type, operation_type, policy_type, replay_type, schedule_type})
    if (type == nullptr || PyModule_AddType(made.get(), type) < 0) return nullptr;
  return made.release();
}
