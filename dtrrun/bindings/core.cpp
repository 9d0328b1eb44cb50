// The simulator's core, without PyTorch: it runs logs, and storages are stand-ins.
#include "core_types.h"
#include "logged.h"
#include "replay.h"

namespace dtrrun {

namespace {

// A Python error as a C++ exception.
class PythonError {
 public:
  PythonError() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    type_ = std::make_shared<Ref>(type);
    value_ = std::make_shared<Ref>(value);
    traceback_ = std::make_shared<Ref>(traceback);
  }
  void restore() const {
    PyErr_Restore(Ref::copy(type_->get()).release(), Ref::copy(value_->get()).release(), Ref::copy(traceback_->get()).release());
  }
  bool is(PyObject* type) const { return PyErr_GivenExceptionMatches(type_->get(), type) != 0; }
  PythonError without_frames() const {
    PythonError made = *this;
    made.traceback_ = std::make_shared<Ref>();
    return made;
  }

 private:
  std::shared_ptr<Ref> type_, value_, traceback_;
};

// -- for Python -----------------------------------------------------------------------------------------------

PyObject* make_version(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *storage, *on_death;
  if (!PyArg_ParseTuple(args, "OO", &storage, &on_death)) return nullptr;
  return guarded([&] { return as_object(version_of_stand_in(storage, on_death).get()).release(); });
}

void delete_version(Node* node) {
  StandInVersion* one = as_stand_in(as_version(node));
  forget_content(&one->node);
  delete one->told;
  free_version(one);
}

PyObject* referent(PyObject* self, PyObject*, PyObject*) {
  const StandInVersion* one = as_stand_in(node_of(self));
  if (one->watch != nullptr) return Ref::copy(PyWeakref_GetObject(one->watch)).release();
  return Ref::copy(one->content == nullptr ? Py_None : reinterpret_cast<PyObject*>(one->content)).release();
}

PyObject* living(PyObject*, PyObject*) {
  return Py_BuildValue("(LL)", static_cast<long long>(living_versions), static_cast<long long>(living_operations));
}

PyObject* key_of_storage(PyObject*, PyObject* storage) { return PyLong_FromVoidPtr(storage); }

PyObject* open_host(PyObject*, PyObject* args) {
  PyObject* ledger;
  long long most_bytes, results_leave;
  double ns_out, ns_in;
  int overlaps;
  if (!PyArg_ParseTuple(args, "OLddLp", &ledger, &most_bytes, &ns_out, &ns_in, &results_leave, &overlaps)) return nullptr;
  return done([&] {
    Core& core = core_of(ledger);
    core.ledger.tier =
        std::make_shared<StandInTier>(static_cast<StandIns&>(*core.backend), most_bytes, ns_out, ns_in, overlaps != 0);
    core.ledger.results_leave = static_cast<ResultsLeave>(results_leave);
  });
}

PyMethodDef methods[] = {
    {"open_host", open_host, METH_VARARGS,
     "open_host(ledger, most_bytes, ns_out, ns_in, results_leave, overlaps): a `core.host.HostMemory` is there."},
    {"living", living, METH_NOARGS, "(versions, operations) that exist, which the garbage collector does not know."},
    {"key_of", key_of_storage, METH_O, "The key of a storage's versions."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_dtrrun_core", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

void raise() { throw PythonError(); }

bool is_error_of(PyObject* type) {
  try {
    throw;
  } catch (const PythonError& error) {
    return error.is(type);
  } catch (...) {
    return false;
  }
}

std::exception_ptr without_frames() {
  try {
    throw;
  } catch (const PythonError& error) {
    return std::make_exception_ptr(error.without_frames());
  } catch (...) {
    return std::current_exception();
  }
}

std::unique_ptr<Core> make_core(PyObject* ledger) {
  return std::make_unique<Core>(std::make_unique<StandIns>(ledger), forget_content);
}

void set_python_error() {
  try {
    throw;
  } catch (const PythonError& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace dtrrun

PyMODINIT_FUNC PyInit__dtrrun_core() {
  using namespace dtrrun;
  free_node = delete_version;
  free_operation = delete_operation;
  storages = {[](Storage* one) { Py_INCREF(as_python(one)); }, [](Storage* one) { Py_DECREF(as_python(one)); }};
  storage_object = [](Storage* one) { return Ref::copy(as_python(one)).release(); };
  storage_in = as_storage_of;
  const std::string name = "_dtrrun_core";
  program_has = [](const VersionObject* one) { return has_stand_in(static_cast<const StandInVersion*>(one)); };
  PyTypeObject* replay_type = make_replay_type("_dtrrun_core.Replay");
  schedule_type = make_schedule_type("_dtrrun_core.Schedule");
  content_type = make_content_type(name);
  Ref made(PyModule_Create(&module));
  if (!made || !add_core_types(made.get(), name, {sizeof(StandInVersion), make_version, referent})) return nullptr;
  logged_program_type = make_logged_program_type(name);
  for (PyTypeObject* type : {replay_type, schedule_type, content_type, logged_program_type, make_logged_run_type(name)})
    if (type == nullptr || PyModule_AddType(made.get(), type) < 0) return nullptr;
  return made.release();
}
