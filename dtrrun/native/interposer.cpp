// Receives operators from the way in, and defines the functions that the extension offers to Python.
//
// When an operator arrives, the program's autograd, autocast, modes and subclasses have done their work, as they would
// without dtrrun. dtrrun enables no mode, so nothing in PyTorch behaves differently. While an operator is handled, the key of
// the way in is off, so operators that the kernel calls do not arrive.
#include "python.h"

#include <atomic>
#include <memory>
#include <unordered_map>

#include "../bindings/core_types.h"
#include "call_notes.h"
#include "compiled_kernels.h"
#include "functions.h"
#include "interposer.h"
#include "pytorch.h"
#include "way_in.h"

namespace dtrrun {
namespace {

std::shared_ptr<Interposer>& interposer = Interposer::current();
std::atomic<bool> is_open{false};

}  // namespace

void arrive(Arrival& arrival) {
  if (is_open) {
    Stopwatch watch;
    watch.is_of(arrival.op);
    if (Counting::own().run(arrival, watch)) return;
    Gil gil;
    if (auto session = interposer) {  // kept alive: another thread may end it while a kernel runs
      session->handle(arrival, gil, watch);
      if (session->recent.is_on) session->recent.add(arrival);
      return;
    }
  }
  if (WayIn::heard != nullptr) WayIn::heard->push_back(c10::toString(arrival.op.operator_name()));
  Off off;
  arrival.run();
}

bool bring_back(const Placeholders::Claim& claim, const std::vector<uintptr_t>& words) {
  auto session = interposer;
  return session && session->touched(claim, words);
}

bool is_session_open() { return is_open; }

void collect_dead() {
  Gil gil;
  if (auto session = interposer) session->collect_dead();
}
void end_counting() {
  Gil gil;
  if (auto session = interposer) session->end_counting();
}
void tick(int64_t now, Stopwatch& watch) {
  Gil gil;
  if (auto session = interposer) session->tick_after(now, watch);
}
void wait_for_counted() { Counting::own().wait(); }
void begin_evicting() { Counting::own().begin_evicting(); }
void end_evicting() { Counting::own().end_evicting(); }
void meet_results(const Arrival& arrival) {
  Gil gil;
  if (auto session = interposer) session->meet_results(arrival);
}

std::optional<c10::DeviceType> device_type_of_session() {
  return interposer ? std::optional(interposer->device.type()) : std::nullopt;
}

std::unique_ptr<Core> make_core(PyObject* ledger) { return std::make_unique<SessionCore>(ledger); }

// -- for Python ------------------------------------------------------------------------------------------

namespace {

PyObject* open_way_in(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    WayIn::open();
    Py_RETURN_NONE;
  });
}

PyObject* heard(PyObject*, PyObject* function) {
  return guarded([&]() -> PyObject* {
    std::vector<std::string> names;
    struct Listening {
      explicit Listening(std::vector<std::string>* names) {
        WayIn::heard = names;
        switch_key(true);
      }
      ~Listening() {
        switch_key(false);
        WayIn::heard = nullptr;
      }
    };
    {
      Listening listening(&names);
      checked(PyObject_CallNoArgs(function));
    }
    Ref list = checked(PyList_New(0));
    for (const std::string& name : names)
      if (PyList_Append(list.get(), checked(PyUnicode_FromString(name.c_str())).get()) < 0) raise();
    return list.release();
  });
}

PyObject* open_session(PyObject*, PyObject* args) {
  PyObject *python, *classes, *placeholder;
  const char* device;
  if (!PyArg_ParseTuple(args, "OOOs", &python, &classes, &placeholder, &device)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (interposer) throw std::runtime_error("dtrrun: a session is on already");
    if (tensor_slot == nullptr) tensor_slot = Ref::copy(placeholder).release();
    Ref former(std::exchange(overwritten_stand_in, attribute(python, "overwritten").release()));
    interposer = std::make_shared<Interposer>(python, classes, device);
    is_open = true;
    watch_faults();
    Py_RETURN_NONE;
  });
}

PyObject* close_session(PyObject*, PyObject*) {
  is_open = false;
  OwnStorages::present().census.counting = OwnStorages::present().census.backward = false;
  unwatch_faults();
  interposer.reset();
  Py_RETURN_NONE;
}

PyObject* bind(PyObject*, PyObject* index) {
  return guarded([&]() -> PyObject* {
    if (interposer) {
      interposer->bind(static_cast<c10::DeviceIndex>(as_number(index)));
      if (!interposer->device.is_modelled()) watch_device_allocator(interposer->device.type());
    }
    Py_RETURN_NONE;
  });
}

PyObject* switch_on(PyObject*, PyObject* on) {
  // A thread's first operator takes a lock of PyTorch's for a moment. In a process forked at that moment, no new thread could
  // run an operator: so that happens here, where no thread forks (`Threads.entering`).
  bool is_on = PyObject_IsTrue(on);
  if (is_on) at::isRecordFunctionEnabled();
  switch_key(is_on);
  Py_RETURN_NONE;
}

PyObject* is_on(PyObject*, PyObject*) { return PyBool_FromLong(is_switched_on()); }

// Called when a gradient of `leaf` has arrived.
PyObject* gradient_arrived(PyObject* otherwise, PyObject* leaf) {
  return guarded([&]() -> PyObject* {
    Stopwatch watch;
    auto session = interposer;
    if (session && is_tensor(leaf)) {
      const at::Tensor& gradient = tensor_of(leaf).grad();
      if (!gradient.defined() || session->pin_gradient(gradient)) return Ref::copy(Py_None).release();
    }
    Stopwatch::Pause pause(watch);
    return PyObject_CallOneArg(otherwise, leaf);
  });
}

PyObject* gradient_hook(PyObject*, PyObject* otherwise) {
  static PyMethodDef arrived = {"gradient_arrived", gradient_arrived, METH_O, "Pins the gradient of a leaf."};
  return PyCFunction_New(&arrived, otherwise);
}

// instances(objects, classes): a program has a million objects of a few thousand types.
PyObject* instances(PyObject*, PyObject* args) {
  PyObject *objects, *classes;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &objects, &PyTuple_Type, &classes)) return nullptr;
  return guarded([&] {
    std::unordered_map<PyTypeObject*, bool> known;
    Ref found = checked(PyList_New(0));
    for (PyObject* one : Items(objects)) {
      auto [type, is_new] = known.try_emplace(Py_TYPE(one), false);
      if (is_new)
        for (PyObject* cls : Items(classes))
          type->second |= PyType_IsSubtype(type->first, reinterpret_cast<PyTypeObject*>(cls)) != 0;
      if (type->second && PyList_Append(found.get(), one) < 0) raise();
    }
    return found.release();
  });
}

PyObject* forget(PyObject*, PyObject*) {
  if (interposer) interposer->forget();
  Py_RETURN_NONE;
}

PyObject* count_only(PyObject*, PyObject* args) {
  long long share;
  int backward;
  if (!PyArg_ParseTuple(args, "Lp", &share, &backward)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (interposer) interposer->count_only(share, backward != 0);
    Py_RETURN_NONE;
  });
}

PyObject* adopt_counted(PyObject*, PyObject* tensors) {
  return guarded([&]() -> PyObject* {
    if (interposer) interposer->adopt_counted(tensors);
    Py_RETURN_NONE;
  });
}

PyObject* stay(PyObject*, PyObject* tensors) {
  return guarded([&] { return PyBool_FromLong(interposer && interposer->stay(tensors)); });
}

PyObject* counters(PyObject*, PyObject*) {
  if (!interposer) return Py_BuildValue("(iiiii)", 0, 0, 0, 0, 0);
  interposer->add_counted();
  return Py_BuildValue("(LLLLL)", static_cast<long long>(interposer->operators_ns),
                       static_cast<long long>(interposer->bookkeeping_ns), static_cast<long long>(interposer->brief_operators_ns),
                       static_cast<long long>(interposer->own_ns()), static_cast<long long>(interposer->cold_ns()));
}

template <int64_t OperatorInfo::* counter>
PyObject* calls(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* { return !interposer ? PyDict_New() : interposer->calls(counter).release(); });
}

PyObject* tells_of_blocks(PyObject*, PyObject*) {
  return guarded([] { return PyBool_FromLong(interposer && DeviceAllocator::tells_of_blocks(interposer->device.type())); });
}

PyObject* read_times(PyObject*, PyObject*) {
  return guarded([] {
    if (interposer) interposer->measuring().poll();
    return Ref::copy(Py_None).release();
  });
}

PyObject* note_tensors(PyObject*, PyObject* on) {
  if (interposer) {
    interposer->recent.is_on = PyObject_IsTrue(on) == 1;
    if (interposer->recent.is_on) interposer->end_counting();
    if (!interposer->recent.is_on) interposer->recent.forget();
  }
  Py_RETURN_NONE;
}

PyObject* note_wrapper(PyObject*, PyObject* args) {
  PyObject *tensor, *inner;
  if (!PyArg_ParseTuple(args, "OU", &tensor, &inner)) return nullptr;
  return guarded([&] {
    if (interposer && is_tensor(tensor)) interposer->recent.add_wrapper(tensor_of(tensor), inner);
    return Ref::copy(Py_None).release();
  });
}

PyObject* needed_without(PyObject*, PyObject* args) {
  PyObject* versions;
  long long from;
  int all;
  if (!PyArg_ParseTuple(args, "O!Lp", &PyList_Type, &versions, &from, &all)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (!interposer) return Py_BuildValue("([]L)", from);
    std::unordered_set<const Version*> leaving;
    for (PyObject* one : Items(versions)) leaving.insert(native_node(one));
    PyObject* found = as_list(interposer->needed_without(leaving, from, all != 0));
    return Py_BuildValue("(NL)", found, static_cast<long long>(interposer->recent.count()));
  });
}

// Calls a function that makes a tensor without an operator, and notes the tensor.
PyObject* call_and_note(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    Ref made = checked(PyObject_Vectorcall(function, args, static_cast<size_t>(count), nullptr));
    if (interposer && interposer->recent.is_on && is_tensor(made.get())) interposer->recent.add(tensor_of(made.get()));
    return made.release();
  });
}

PyObject* noted(PyObject*, PyObject* function) {
  static PyMethodDef call = {"noted", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_and_note)), METH_FASTCALL,
                             nullptr};
  return PyCFunction_New(&call, function);
}

PyObject* settle(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    auto session = interposer;
    return PyBool_FromLong(session && session->settle());
  });
}

PyObject* share(PyObject*, PyObject*) {
  if (interposer) interposer->share();
  Py_RETURN_NONE;
}

PyObject* leave_turn(PyObject*, PyObject*) { return PyBool_FromLong(interposer && interposer->leave()); }

PyObject* rejoin_turn(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    auto session = interposer;
    return PyBool_FromLong(!session || session->rejoin());
  });
}

PyObject* relearn(PyObject*, PyObject*) {
  if (interposer) interposer->relearn();
  Py_RETURN_NONE;
}

PyObject* is_inside(PyObject*, PyObject*) { return PyBool_FromLong(interposer && interposer->is_inside()); }

PyObject* present_state(PyObject*, PyObject* args) {
  int general, on_cpu;
  if (!PyArg_ParseTuple(args, "pp", &general, &on_cpu)) return nullptr;
  return guarded([&] { return PyLong_FromVoidPtr(const_cast<KernelState*>(KernelState::now(general != 0, on_cpu != 0))); });
}

PyObject* with_state(PyObject*, PyObject* args) {
  PyObject *state, *function;
  int own;
  if (!PyArg_ParseTuple(args, "O!Op", &PyLong_Type, &state, &function, &own)) return nullptr;
  return guarded([&] {
    Restored settings(*static_cast<const KernelState*>(PyLong_AsVoidPtr(state)));
    Ref found;
    Shortage::Kernel::run(/*locked=*/true, own, [&] { found = checked(PyObject_CallNoArgs(function)); });
    return found.release();
  });
}

PyObject* run_silently(PyObject* function, bool recorded) {
  Silent silent;
  at::RecordFunctionGuard records(recorded && at::isRecordFunctionEnabled());
  return checked(PyObject_CallNoArgs(function)).release();
}

PyObject* silently(PyObject*, PyObject* args) {
  PyObject* function;
  int recorded;
  if (!PyArg_ParseTuple(args, "Op", &function, &recorded)) return nullptr;
  return guarded([&] { return run_silently(function, recorded != 0); });
}

PyObject* aside(PyObject*, PyObject* function) {
  return guarded([&] {
    Shortage::Ignored ignored;
    return run_silently(function, /*recorded=*/false);
  });
}

}  // namespace

PyMethodDef session_functions[] = {
    {"present_state", present_state, METH_VARARGS,
     "present_state(general, on_cpu): for tests: the settings that kernels read, as a number that is the same for equal settings.\n"
     "general: leave out those that only some kernels read."},
    {"with_state", with_state, METH_VARARGS,
     "with_state(state, function, own): for tests: call `function` as a replay's kernel, with these settings. own: whether it is\n"
     "PyTorch's own, which must not go on without memory that it is refused."},
    {"silently", silently, METH_VARARGS,
     "silently(function, recorded): call `function`, and suppress the warnings of its operators. recorded: whether PyTorch's\n"
     "profiler may see these."},
    {"aside", aside, METH_O,
     "aside(function): call `function`, whose operators nobody sees, and nothing is evicted for the memory that they are refused."},
    {"compiled_kernel", CompiledKernel::make, METH_VARARGS,
     "compiled_kernel(name, kernel, plain, arguments): return a function that replaces a kernel generated by torch.compile.\n"
     "kernel: called by an operator; plain: called without a session. arguments: a letter for each: r and w for a tensor\n"
     "that it reads or writes, i and f for a number."},
    {"empty_strided_cpu", empty_strided<c10::DeviceType::CPU>, METH_VARARGS,
     "empty_strided_cpu(size, stride, dtype): run as an operator."},
    {"empty_strided_cuda", empty_strided<c10::DeviceType::CUDA>, METH_VARARGS,
     "empty_strided_cuda(size, stride, dtype): run as an operator."},
    {"open_way_in", open_way_in, METH_NOARGS,
     "Let the operators of threads arrive that `switch` has switched on, for the lifetime of the process: once in a process."},
    {"heard", heard, METH_O,
     "heard(function): call `function` without a session, and return the names of the operators that arrive."},
    {"open", open_session, METH_VARARGS, "Begin a session: open(interposer, classes, tensor_slot, device_type)."},
    {"bind", bind, METH_O, "Note that a session on a GPU has begun to use the device with this index."},
    {"close", close_session, METH_NOARGS, "End the session."},
    {"switch", switch_on, METH_O, "Switch on or off whether this thread's operators arrive."},
    {"is_on", is_on, METH_NOARGS, "Return whether this thread's operators arrive."},
    {"gradient_hook", gradient_hook, METH_O,
     "gradient_hook(otherwise): return a hook that pins the gradients of leaves. It calls `otherwise` where Python must."},
    {"instances", instances, METH_VARARGS,
     "instances(objects, classes): return the objects in a list whose type is one of these classes, or derived from one."},
    {"forget", forget, METH_NOARGS, "Forget all signatures."},
    {"count_only", count_only, METH_VARARGS,
     "count_only(share, backward): between two steps: only count operators from now on, if memory is ample: tensors take at most one\n"
     "in so many bytes of the limit. backward: otherwise, those of backward passes that make little."},
    {"adopt_counted", adopt_counted, METH_O,
     "adopt_counted(tensors): enter those in a list, and the gradients of those, that have only been counted."},
    {"stay", stay, METH_O,
     "stay(tensors): return whether the tensors in a list stay in memory without a lock, because operators are only counted."},
    {"counters", counters, METH_NOARGS,
     "Return ns: in operators, of bookkeeping, and what was sampled (`Stopwatch`): in operators, our own, cold."},
    {"python_calls", calls<&OperatorInfo::python_calls>, METH_NOARGS,
     "Return how often Python was asked about each call of an operator, by name."},
    {"native_calls", calls<&OperatorInfo::native_calls>, METH_NOARGS,
     "Return how often each operator was handled without, by name."},
    {"list_calls", calls<&OperatorInfo::list_calls>, METH_NOARGS,
     "For tests: return how often each operator was handled by `lists.h`, by name."},
    {"tells_of_blocks", tells_of_blocks, METH_NOARGS,
     "Return whether the GPU's allocator tells of the blocks that it hands out. If so, it does from now on."},
    {"note_tensors", note_tensors, METH_O,
     "note_tensors(on): note each tensor that an operator makes from now on, or forget them."},
    {"note_wrapper", note_wrapper, METH_VARARGS,
     "note_wrapper(tensor, inner): note a tensor that refers to another, which is its attribute `inner`."},
    {"needed_without", needed_without, METH_VARARGS,
     "needed_without(constants, since, all): return the versions that would be recomputed from these constants, of tensors noted since\n"
     "then that somebody but autograd's graph holds, or of all; and the number for the next `since`."},
    {"noted", noted, METH_O, "noted(function): return a function that calls it, and notes the tensor that it makes."},
    {"read_times", read_times, METH_NOARGS, "Read what first calls on a GPU have taken, as far as it is known."},
    {"settle", settle, METH_NOARGS,
     "Move memory that is back to the address that was touched. Returns False if the system has no memory."},
    {"share", share, METH_NOARGS, "Let several threads take turns. None may be in an operator now."},
    {"leave_turn", leave_turn, METH_NOARGS,
     "Give up this thread's turn, as code of the program is about to run. Returns whether it had no lock."},
    {"rejoin_turn", rejoin_turn, METH_NOARGS, "Return there, with the lock if others need it. False: call it again."},
    {"relearn", relearn, METH_NOARGS, "Forget what is known about operators."},
    {"is_inside", is_inside, METH_NOARGS, "Return whether another thread is in an operator without a lock."},
    {nullptr, nullptr, 0, nullptr},
};

namespace {

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_dtrrun_native", nullptr, -1, session_functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace dtrrun

PyMODINIT_FUNC PyInit__dtrrun_native() {
  using namespace dtrrun;
  storages = {[](Storage* one) { ImplRef::reclaim_copy(as_impl(one)).release(); },
              [](Storage* one) { ImplRef::reclaim(as_impl(one)); }};
  count_nodes();
  storage_object = [](Storage* one) { return object_of(as_torch(StorageRef::copy(one))).release(); };
  storage_in = [](PyObject* object) {
    if (!is_storage(object)) throw c10::TypeError({__func__, __FILE__, 0}, "a storage is wanted");
    return as_storage(storage_of(object).unsafeGetStorageImpl());
  };
  settle_deaths = tell_deaths;
  program_has = [](const VersionObject* one) { return has_storage(static_cast<const StoredVersion*>(one)); };
  observed_call_type = make_observed_call_type();
  CompiledKernel::type = CompiledKernel::make_type();
  CallNotesObject::type = CallNotesObject::make_type();
  Ref made(PyModule_Create(&module));
  if (!made || !add_core_types(made.get(), "_dtrrun_native", {sizeof(StoredVersion), make_version, call_version})) return nullptr;
  for (PyMethodDef* functions : {memory_functions, foreign_functions})
    if (PyModule_AddFunctions(made.get(), functions) < 0) return nullptr;
  if (!add_entry_types(made.get())) return nullptr;
  if (observed_call_type == nullptr || CompiledKernel::type == nullptr || PyModule_AddType(made.get(), observed_call_type) < 0)
    return nullptr;
  if (CallNotesObject::type == nullptr || PyModule_AddType(made.get(), CallNotesObject::type) < 0) return nullptr;
  return guarded([&] {
    translate_errors();
    auto extension = py::reinterpret_borrow<py::module_>(made.get());
    bind_turn_lock(extension);
    return made.release();
  });
}
