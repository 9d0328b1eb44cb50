// The simulator's core, without PyTorch: it runs logs, and storages are stand-ins.
#include "core_types.h"
#include "logged.h"
#include "replay.h"

namespace dtrrun {

namespace {

// -- for Python -----------------------------------------------------------------------------------------------

PyObject* make_version(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *storage, *on_death;
  if (!PyArg_ParseTuple(args, "OO", &storage, &on_death)) return nullptr;
  return guarded([&] {
    const Told* told = Py_TYPE(on_death) == own_caster<Told>::type ? bound<Told>(on_death) : nullptr;
    return as_object(version_of_stand_in(storage, on_death, told).get()).release();
  });
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

void open_host(Core& core, int64_t most_bytes, double ns_out, double ns_in, int64_t results_leave, bool overlaps) {
  core.ledger.tier = std::make_shared<StandInTier>(static_cast<StandIns&>(*core.backend), most_bytes, ns_out, ns_in, overlaps);
  core.ledger.results_leave = static_cast<ResultsLeave>(results_leave);
}

}  // namespace

void raise() { throw py::error_already_set(); }

bool is_error_of(PyObject* type) {
  try {
    throw;
  } catch (const py::error_already_set& error) {
    return error.matches(type);
  } catch (...) {
    return false;
  }
}

std::exception_ptr without_frames() {
  try {
    try {
      throw;
    } catch (const py::error_already_set& error) {
      PyException_SetTraceback(error.value().ptr(), Py_None);
      PyErr_SetObject(error.type().ptr(), error.value().ptr());
      raise();
    }
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
  } catch (py::error_already_set& error) {
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

PYBIND11_MODULE(_dtrrun_core, module) {
  using namespace dtrrun;
  free_node = delete_version;
  free_operation = delete_operation;
  storages = {[](Storage* one) { Py_INCREF(as_python(one)); }, [](Storage* one) { Py_DECREF(as_python(one)); }};
  storage_object = [](Storage* one) { return Ref::copy(as_python(one)).release(); };
  storage_in = as_storage_of;
  program_has = [](const VersionObject* one) { return has_stand_in(static_cast<const StandInVersion*>(one)); };
  const std::string name = "_dtrrun_core";
  content_type = make_content_type(name);
  translate_errors();
  add_core_types(module, name, {sizeof(StandInVersion), make_version, referent});
  if (PyModule_AddType(module.ptr(), content_type) < 0) raise();
  bind_replay(module);
  bind_logged(module);
  module.def("open_host", &open_host, "ledger"_a, "most_bytes"_a, "ns_out"_a, "ns_in"_a, "results_leave"_a, "overlaps"_a,
             "A `core.host.HostMemory` is there.");
  module.def(
      "living", [] { return std::pair(living_versions, living_operations); },
      "(versions, operations) that exist, which the garbage collector does not know.");
  module.def(
      "key_of", [](py::handle storage) { return reinterpret_cast<int64_t>(storage.ptr()); }, "The key of a storage's versions.");
}
